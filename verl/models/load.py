"""From a path to a model in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.models import ModelConfig
from verl.core.errors import ModelError
from verl.models.config import NATIVE_TYPES, DecoderConfig
from verl.models.policy import Policy
from verl.models.source import ModelSource, resolve

_DERIVED = re.compile(r".*rotary_emb\.inv_freq|.*\.attention\.(bias|masked_bias)")
"""Names that old checkpoints carry and every reader recomputes."""


def load_policy(path: str | Path, cfg: ModelConfig, device: torch.device | str = "cpu") -> Policy:
    source = resolve(path, cfg.trust_remote_code)
    return load_native(source, getattr(torch, cfg.dtype), device)


def load_native(source: ModelSource, dtype: torch.dtype, device: torch.device | str) -> Policy:
    policy = Policy(DecoderConfig.from_hf(source.hf_config()), source, dtype)
    policy.to_empty(device=device)
    fill(policy, source.tensors(), source.name)
    return policy


@torch.no_grad()
def fill(module: nn.Module, tensors: Iterable[tuple[str, Tensor]], name: str, ignore: str = r"(?!)") -> None:
    """Copy weights by name into the parameters of `module`, casting once. Every parameter must come exactly once.

    ignore: pattern of further names that this module does not have. ModelError names what is missing or strange.
    """
    params = dict(module.named_parameters())
    missing = set(params)
    for key, tensor in tensors:
        if key not in params:
            if _DERIVED.fullmatch(key) or re.fullmatch(ignore, key):
                continue
            raise ModelError(f"{name}: weight {key!r} does not belong to this architecture; check its config.json")
        if tensor.shape != params[key].shape:
            raise ModelError(
                f"{name}: weight {key!r} has shape {tuple(tensor.shape)}, the config says {tuple(params[key].shape)}"
            )
        params[key].copy_(tensor)
        missing.discard(key)
    if missing:
        raise ModelError(f"{name}: weight {min(missing)!r} is missing ({len(missing)} in all); the model is incomplete")
