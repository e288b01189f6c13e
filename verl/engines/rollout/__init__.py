"""Rollout engines. `load` makes one from a model path, `attach` one on a policy that a trainer holds.

A backend is a function (policy, eos_token_ids, **options) -> Engine in the registry; nothing of a backend is imported
before it is asked for.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from verl.config.loader import check as check_config
from verl.config.models import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.core import ConfigError, Registry, RolloutError
from verl.engines.rollout.options import Options

if TYPE_CHECKING:
    from verl.engines.rollout.base import Engine

_NOT_NATIVE = (
    "rollout.backend=native needs a model that verl's own decoder runs, and this one runs on transformers; "
    "set rollout.backend=hf (or model.implementation=native where the architecture is known)"
)
_NO_VLLM = "rollout.backend=vllm is not part of this version of verl; set rollout.backend to native or hf"
BACKENDS: Registry[Any] = Registry("rollout backend")


@BACKENDS.register("native")
def _native(
    policy: Any,
    eos_token_ids: tuple[int, ...],
    max_sequences: int = 256,
    prefill_tokens: int = 4096,
    kv_cache_gb: float | None = None,
    prefix_cache_gb: float = 0.0,
    max_model_len: int | None = None,
    compile: str = "auto",
) -> Engine:
    """Continuous batching on the trainer's own weights; Llama, Mistral, Qwen2, Qwen3."""
    from verl.engines.rollout.native import NativeEngine

    if policy.implementation != "native":
        raise RolloutError(_NOT_NATIVE)
    return NativeEngine(
        policy,
        eos_token_ids,
        max_sequences=max_sequences,
        prefill_tokens=prefill_tokens,
        kv_cache_gb=kv_cache_gb,
        prefix_cache_gb=prefix_cache_gb,
        max_model_len=max_model_len,
        compile=compile,
    )


@BACKENDS.register("hf")
def _hf(
    policy: Any, eos_token_ids: tuple[int, ...], max_sequences: int = 256, max_model_len: int | None = None
) -> Engine:
    """transformers generate on the trainer's own weights; any causal language model."""
    from verl.engines.rollout.hf import HFEngine

    return HFEngine(policy, eos_token_ids, max_sequences=max_sequences, max_model_len=max_model_len)


@BACKENDS.register("vllm")
def _vllm(policy: Any, eos_token_ids: tuple[int, ...], **options: Any) -> Engine:
    """vLLM; not part of this version."""
    raise RolloutError(_NO_VLLM)


def check(cfg: RolloutConfig, implementation: str) -> None:
    """Refuse, without a model, what `attach` would refuse with one. implementation: model.implementation."""
    known = BACKENDS[cfg.backend]
    if known.name == "vllm":
        raise RolloutError(_NO_VLLM)
    if known.name == "native" and implementation == "transformers":
        raise RolloutError(_NOT_NATIVE)
    _check_used(cfg)


def _check_used(cfg: RolloutConfig) -> None:
    """ConfigError for an option that is set and that the backend does not have."""
    for name in sorted(set(_options("native")) - set(_options(cfg.backend))):
        value, default = getattr(cfg, name), RolloutConfig.model_fields[name].default
        if value != default:
            raise ConfigError(
                f"rollout.{name}: {value} does nothing with rollout.backend={cfg.backend}, only native has it; "
                f"leave it out (the default is {'null' if default is None else default}), or set rollout.backend=native"
            )


def load(backend: str, model_path: Any, dtype: str = "bfloat16", device: str = "auto", **options: Any) -> Engine:
    """An engine with its own model.

    backend: `native` or `hf`.
    model_path: as actor.path in the config, or a loaded Hugging Face causal language model.
    dtype: bfloat16 or float32. device: auto, cpu, cuda.
    options: max_sequences, max_model_len, trust_remote_code; native: prefill_tokens, kv_cache_gb, prefix_cache_gb,
    compile.
    Raises ConfigError for an unknown backend and for memory that is not there, RolloutError for an option that is
    unknown, of another type or out of range, ModelError for the path.
    """
    entry = BACKENDS[backend]
    remote_code = options.pop("trust_remote_code", False)
    _check_options(backend, options)
    if backend == "vllm":
        return entry.fn(None, (), **options)
    Options(**options)  # refuses a wrong value before the model loads
    from verl.models.load import load_policy

    implementation = "transformers" if backend == "hf" else "native"
    cfg = check_config(
        ModelConfig, {"implementation": implementation, "dtype": dtype, "trust_remote_code": remote_code}
    )
    policy = load_policy(model_path, cfg, _device(device))
    return entry.fn(policy, policy.source.eos_token_ids, **options)


def attach(backend: str, policy: Any, cfg: RolloutConfig, **options: Any) -> Engine:
    """An engine on a policy that is being trained: it reads the policy's parameters where they lie, no second copy.

    RolloutError: this rank holds only parts of them.
    """
    from verl.parallel.parts import has_parts

    entry = BACKENDS[backend]
    if has_parts(policy):
        raise RolloutError("the policy is sharded over ranks (fsdp above 1); generation needs whole weights of its own")
    if backend != "vllm":
        _check_used(cfg)
    known = {
        "max_sequences": cfg.max_sequences,
        "prefill_tokens": cfg.prefill_tokens,
        "kv_cache_gb": cfg.kv_cache_gb,
        "prefix_cache_gb": cfg.prefix_cache_gb,
        "compile": cfg.compile,
    }
    options = {k: v for k, v in known.items() if k in _options(backend)} | options
    _check_options(backend, options)
    return entry.fn(policy, policy.source.eos_token_ids, **options)


def _options(backend: str) -> list[str]:
    """Names that the backend's function takes after the policy and its end tokens."""
    return list(inspect.signature(BACKENDS[backend].fn).parameters)[2:]


def _check_options(backend: str, options: dict[str, Any]) -> None:
    wrong = sorted(set(options) - set(_options(backend)))
    if wrong and backend != "vllm":
        raise RolloutError(
            f"rollout backend {backend!r} has no option {wrong[0]!r}; it has {', '.join(_options(backend))}"
        )


def _device(name: str) -> Any:
    import torch

    cuda = torch.cuda.is_available()
    known = {"auto": "cuda" if cuda else "cpu", "cpu": "cpu"} | ({"cuda": "cuda"} if cuda else {})
    if not isinstance(name, str) or name not in known:
        raise RolloutError(
            f"device={name!r}: here it can be {', '.join(known)}; check `python -m torch.utils.collect_env`"
        )
    return torch.device(known[name])


__all__ = ["BACKENDS", "attach", "check", "load"]
