"""Activation checkpointing: the same gradients from fewer kept bytes, in native and transformers models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.helpers import FP32, HF, family_batch
from tests.tiny import make_model
from tests.trainer import tiny_run
from verl.config.models import ModelConfig
from verl.core import ConfigError
from verl.models.load import load_policy, load_value_model
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput
from verl.models.recompute import recompute_layers
from verl.trainer.build import build
from verl.utils.console import RunConsole


def kept_bytes(run: Any, params: set[int]) -> tuple[Tensor, int]:
    """Result, and bytes of the storages that autograd keeps for backward, parameters aside."""
    kept: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(x)  # so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    return out, sum(kept.values())


def gradients(model: nn.Module, kind: str) -> tuple[dict[str, Tensor], int]:
    packed = PackedInput.of(family_batch(), share_prompt=model.shares_prompt)
    run = (lambda: token_logprobs(model, packed, 1.0)[0]) if kind == "policy" else (lambda: model.values(packed))
    out, kept = kept_bytes(run, {p.untyped_storage().data_ptr() for p in model.parameters()})
    (out * torch.linspace(-1, 1, len(out))).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize(
    ("cfg", "family"), [(FP32, "llama"), (FP32, "mistral"), (HF, "llama"), (HF, "gpt2"), (HF, "opt")]
)
def test_gradients_are_equal_and_less_is_kept(tmp_path: Path, kind: str, cfg: ModelConfig, family: str) -> None:
    more: dict[str, Any] = {"ffn_dim": 48, "word_embed_proj_dim": 32} if family == "opt" else {}
    layers = {"n_layer": 6} if family == "gpt2" else {"num_hidden_layers": 6}
    folder = make_model(tmp_path / "model", family, head="lm" if kind == "policy" else "reward", **more, **layers)
    load = load_policy if kind == "policy" else load_value_model
    plain, again = load(folder, cfg), load(folder, cfg)
    again.recompute_layers()
    want, whole = gradients(plain, kind)
    got, less = gradients(again, kind)
    assert got.keys() == want.keys() and len(want) > 10
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-6, atol=1e-6 * float(grad.abs().max()))
    assert less < (0.6 if kind == "policy" else 0.4) * whole, (less, whole)


def test_no_grad_passes_are_as_before(tmp_path: Path) -> None:
    for cfg in (FP32, HF):
        policy = load_policy(make_model(tmp_path / "model", "llama"), cfg)
        packed = PackedInput.of(family_batch(), share_prompt=False)
        with torch.no_grad():
            want = policy.features(packed)
            policy.recompute_layers()
            assert torch.equal(policy.features(packed), want)


def test_a_module_without_marked_layers_is_refused_by_the_flag() -> None:
    with pytest.raises(ConfigError, match="^update.activation_checkpointing: Linear has no layers"):
        recompute_layers(nn.Linear(2, 2))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_run_learns_the_same_weights(tmp_path: Path, implementation: str) -> None:
    weights = []
    backend = "native" if implementation == "native" else "hf"
    for on in (False, True):
        cfg = tiny_run.config(
            tmp_path,
            "ppo",
            update={"activation_checkpointing": on},
            model={"implementation": implementation},
            rollout={"backend": backend},
        )
        trainer = build(cfg, RunConsole()).trainer
        for _ in range(2):
            trainer.train_step()
        roles = trainer.roles
        weights.append([*roles.actor.worker.policy.parameters(), *roles.critic.worker.model.parameters()])
        decoders = [m for m in roles.actor.worker.policy.modules() if hasattr(m, "recompute")]
        assert all(m.recompute == on for m in decoders) and bool(decoders) == (implementation == "native")
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
