"""Activation checkpointing of transformers modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.core.errors import ConfigError


def recompute_layers(module: nn.Module) -> None:
    """Every layer that transformers marks as fit for it keeps its inputs only, and runs again in backward.

    transformers' own switch acts in training mode alone; our models stay in eval mode, where no dropout differs between
    two passes. So the layers of this module are told directly.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"update.activation_checkpointing: {type(module).__name__} has no layers that transformers can compute "
            "again in backward; set it to false, or lower update.micro_batch_tokens"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
