"""The compiled kernels of training as steps that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.kernels import Kernels
from verl.models.ragged import Ragged


class FusedNorm(torch.autograd.Function):
    """`ops.rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: Kernels) -> Tensor:
        x = x.contiguous()
        out, scale = kernels.norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        return *ctx.kernels.norm_backward(x, weight, scale, grads[0].contiguous()), None, None


class FusedGate(torch.autograd.Function):
    """`ops.silu_mul`; keeps gate and up only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.gate(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *ctx.kernels.gate_backward(gate, up, grads[0].contiguous()), None


class FusedRotate(torch.autograd.Function):
    """`ops.rotate`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return kernels.turn(x.contiguous(), cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.kernels.turn(grads[0].contiguous(), cos, sin, -1.0), None, None, None


class FusedAttention(torch.autograd.Function):
    """Attention of ragged problems; keeps no scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problems: Ragged, kernels: Kernels) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, norm = kernels.attend(problems, q, k, v)
        ctx.save_for_backward(q, k, v, out, norm)
        ctx.problems, ctx.kernels = problems, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, norm = ctx.saved_tensors
        return *ctx.kernels.attend_backward(ctx.problems, (q, k, v), out, norm, grads[0].contiguous()), None, None
