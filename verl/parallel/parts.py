"""Tensors of which a rank holds a part: from the whole to the part and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_cut(x: Tensor) -> bool:
    """Whether ranks hold parts of x."""
    return isinstance(x, DTensor)


def has_parts(module: object) -> bool:
    """Whether this rank holds only parts of a module's parameters."""
    return isinstance(module, nn.Module) and any(is_cut(p) for p in module.parameters())


@torch.no_grad()
def part(x: Tensor) -> Tensor:
    """What this rank holds of x, in the same storage; x itself where it is not cut."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def whole(x: Tensor) -> Tensor:
    """All of x; every rank that holds a part calls it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def gathered(tree: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """A state tree with whole tensors in place of cut ones, on the host; {} without `keep`. All ranks call it, and one
    tensor is whole at a time where it is not kept.
    """
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            value = gathered(value, keep)
        elif isinstance(value, DTensor):
            value = whole(value)
            value = value.cpu() if keep else None
        if keep:
            out[key] = value
    return out
