"""Elementwise steps of the decoder, with backwards that pass over memory fewer times than autograd's own on a CPU.

`kernels`: compiled ones, which pass over it once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.fused import FusedGate, FusedNorm, FusedRotate
from verl.models.kernels import Kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernels: Kernels | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in fp32 at least."""
    whole = weight.shape == x.shape[-1:] and weight.is_contiguous()
    if kernels is not None and whole and kernels.takes(x, weight):
        return FusedNorm.apply(x, weight, eps, kernels)
    if x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


def rotate(x_PHd: Tensor, cos_P1e: Tensor, sin_P1e: Tensor, kernels: Kernels | None = None) -> Tensor:
    """Rotary embedding: element i is paired with element i + d/2, as in Hugging Face checkpoints."""
    own = all(a.shape == (len(x_PHd), 1, x_PHd.shape[2] // 2) and a.is_contiguous() for a in (cos_P1e, sin_P1e))
    if kernels is not None and own and kernels.takes(x_PHd, cos_P1e, sin_P1e):
        return FusedRotate.apply(x_PHd, cos_P1e, sin_P1e, kernels)
    return _Rotate.apply(x_PHd, cos_P1e, sin_P1e)


def silu_mul(gate: Tensor, up: Tensor, kernels: Kernels | None = None) -> Tensor:
    """silu(gate) * up; writes into `gate` where no gradient is asked for."""
    if kernels is not None and kernels.takes(gate, up) and gate.shape == up.shape:
        return FusedGate.apply(gate, up, kernels)
    if torch.is_grad_enabled():
        return F.silu(gate) * up
    return F.silu(gate, inplace=True).mul_(up)


class _RMSNorm(torch.autograd.Function):
    """Forward in two passes; backward through the fused kernel of layer norm.

    With mean 0 and our own 1/rms, layer norm's backward differs from this one's only by the term that it subtracts for
    the mean: rms^-1 * mean(grad * weight), which is added back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=kind)
        scale = torch.rsqrt(norm.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].contiguous()
        wide = weight.to(scale.dtype)  # layer norm keeps its statistics in this dtype only if the weight has it too
        grad_x, grad_w, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x.contiguous(), list(weight.shape), torch.zeros_like(scale), scale, wide, None, [True, True, False]
        )
        mean = (grad @ weight).unsqueeze(-1) * scale / x.shape[-1]
        return grad_x.add_(mean), grad_w.to(weight.dtype), None


class _Rotate(torch.autograd.Function):
    """A rotation; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x)
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a)
    out_a.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b)
    out_b.addcmul_(a, sin, value=sign)
    return out
