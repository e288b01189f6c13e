"""Elementwise steps of the decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x_PHd: Tensor, cos_P1e: Tensor, sin_P1e: Tensor) -> Tensor:
    """Rotary embedding: element i is paired with element i + d/2, as in Hugging Face checkpoints."""
    a, b = x_PHd.chunk(2, dim=-1)
    return torch.cat((a * cos_P1e - b * sin_P1e, b * cos_P1e + a * sin_P1e), dim=-1)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up
