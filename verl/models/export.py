"""A trained model as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from verl.core.errors import ModelError
from verl.models.gather import all_succeeded, is_writer, whole_tensors
from verl.models.hf import TransformersPolicy
from verl.models.policy import AnyPolicy, Policy

MAX_SHARD_BYTES = 5_000_000_000
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def export(
    policy: AnyPolicy,
    folder: str | Path,
    tensors: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write weights, config, tokenizer with chat template, and generation config; return the folder.

    tensors: weights by name in place of the policy's own (masters, an average, what ranks hold together); the dtype is
    theirs.
    All is written beside `folder` and renamed, so a reader never sees half a model.
    A policy that is cut: every process that holds a part calls this, the first gathers (on its host) and writes; all
    return when the folder is there.
    ModelError where it cannot be written.
    """
    folder = Path(folder)
    if not isinstance(policy, Policy) or (policy.decoder.tp is None and policy.decoder.pp is None):
        return _export(policy, folder, tensors, max_shard_bytes)
    state = whole_tensors(policy, dict(policy.named_parameters()) if tensors is None else tensors)
    failed = True
    try:
        if is_writer(policy):
            _export(policy, folder, state, max_shard_bytes)
        failed = False
    finally:
        all_succeeded(policy, failed, str(folder))
    return folder


def _export(policy: AnyPolicy, folder: Path, tensors: Mapping[str, Tensor] | None, max_shard_bytes: int) -> Path:
    draft = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        draft.mkdir(parents=True)
        if isinstance(policy, TransformersPolicy):
            _write_transformers(policy, draft, tensors, max_shard_bytes)
        else:
            _write_native(
                policy, draft, dict(policy.named_parameters()) if tensors is None else tensors, max_shard_bytes
            )
        policy.source.tokenizer().save_pretrained(draft)
        policy.source.generation_config().save_pretrained(draft)
        _replace(draft, folder)
    except (OSError, SafetensorError) as e:  # a full disk is either, by which file it meets
        raise ModelError(
            f"{folder}: the model cannot be written ({getattr(e, 'strerror', None) or e}); check space and permissions"
        ) from e
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_native(policy: Policy, folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    names = dict(Policy(policy.decoder.config, policy.source).named_parameters()).keys()  # whole, without memory
    assert set(tensors) == set(names), f"export of other tensors than the policy's: {set(tensors) ^ set(names)}"
    write_safetensors(folder, tensors, max_shard_bytes)
    config = policy.source.hf_config()
    config.architectures = [_ARCHITECTURES[policy.decoder.config.model_type]]
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)


def _write_transformers(
    policy: TransformersPolicy, folder: Path, tensors: Mapping[str, Tensor] | None, max_shard_bytes: int
) -> None:
    if tensors is None:
        policy.module.save_pretrained(folder, max_shard_size=max_shard_bytes)
        return
    own = policy.module.state_dict()
    buffers = {name: own[name] for name, _ in policy.module.named_buffers() if name in own}
    state = buffers | {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    policy.module.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_bytes)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")  # it wrote the module's own
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_safetensors(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """One `model.safetensors`, or shards of at most max_shard_bytes with their index; one is in memory at a time."""
    shards = list(_shards(tensors, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        part = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        more = tensor.numel() * tensor.element_size()
        if names and size + more > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names


def _replace(draft: Path, folder: Path) -> None:
    """Put draft in the place of folder; an older export is moved away first and removed last."""
    for file in draft.iterdir():
        with open(file, "rb") as f:
            os.fsync(f.fileno())
    old = draft.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
