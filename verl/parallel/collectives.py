"""Collectives of tensor parallelism as steps that autograd knows (Shoeybi et al. 2019, arXiv:1909.08053, figure 3).

Every rank of the axis calls them in the same order. A "whole" tensor is the same on all ranks; a "partial" one is a
summand of what is meant. The gradient of a whole tensor is whole as well, and autograd keeps it so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.parallel.axes import Axis


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """A whole tensor enters parts that differ by rank: itself; backward sums the gradients of the parts."""
    return _Copy.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Partial results become whole: the sum over ranks, written into `x`; backward is the identity.

    `x` must be a contiguous tensor that nothing else reads.
    """
    return _Reduce.apply(x, axis)


def share_rows(weight: Tensor, start: int, rows: int, axis: Axis) -> Tensor:
    """Rows from `start` on of a parameter of `rows` rows, some of which other ranks hold too: itself; backward sums the
    gradients of each row over the ranks that hold it.
    """
    return _ShareRows.apply(weight, start, rows, axis)


def gather_columns(x: Tensor, width: int, total: int, axis: Axis) -> Tensor:
    """[..., total] from parts [..., width] that follow each other by rank; the last may be narrower. No gradient."""
    part = x.new_zeros(*x.shape[:-1], width)
    part[..., : x.shape[-1]] = x
    parts = x.new_empty(axis.size * part.numel())
    dist.all_gather_into_tensor(parts, part.flatten(), group=axis.group)
    return parts.view(axis.size, *part.shape).movedim(0, -2).flatten(-2)[..., :total]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grads[0], ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _ShareRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, start: int, rows: int, axis: Axis) -> Tensor:
        ctx.start, ctx.rows, ctx.axis = start, rows, axis
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mine = slice(ctx.start, ctx.start + len(grads[0]))
        whole = grads[0].new_zeros(ctx.rows, *grads[0].shape[1:])
        whole[mine] = grads[0]
        dist.all_reduce(whole, group=ctx.axis.group)
        return whole[mine], None, None, None


def _summed(grad: Tensor, axis: Axis) -> Tensor:
    """A new tensor: autograd may have handed the same gradient to another step."""
    out = grad.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=axis.group)
    return out
