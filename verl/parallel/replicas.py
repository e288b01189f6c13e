"""Sums of many tensors over ranks that hold the same ones, in few messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET = 2**24
"""Most elements of one all-reduce, 64 MiB in fp32, unless a single tensor has more."""


@torch.no_grad()
def sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Each tensor becomes the sum over the ranks of `group`, in place and the same to the bit everywhere. A collective:
    every rank calls it with tensors of the same shapes.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat([t.reshape(-1) for t in bucket])
        dist.all_reduce(flat, group=group)
        for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            t.copy_(part.view(t.shape))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in order, cut where a bucket would get too large; few large messages cost less than many small."""
    out: list[list[Tensor]] = []
    size = 0
    for t in tensors:
        if not out or size + t.numel() > _BUCKET:
            out.append([])
            size = 0
        out[-1].append(t)
        size += t.numel()
    return out
