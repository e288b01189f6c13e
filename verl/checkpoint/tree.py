"""A state tree as two plain files: tensors (safetensors) and everything else (JSON). No pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SEP = "/"


def split(tree: Mapping[str, Any], at: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """({path: tensor}, {path: plain value}). Keys may hold dots but not `/`."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in tree.items():
        assert SEP not in key, f"state key {key!r} holds {SEP!r}"
        path = f"{at}{key}"
        if isinstance(value, torch.Tensor):
            tensors[path] = value.detach().contiguous()
        elif isinstance(value, Mapping):
            below = split(value, path + SEP)
            tensors |= below[0]
            plain |= below[1]
            if not value:
                plain[path] = {}
        else:
            plain[path] = value
    return tensors, plain


def join(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `split`, on both parts laid together."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(SEP)
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree
