"""Padded [B, T] tensors checked and seen as flat segments: every slot is a token, and the mask says which count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.segments import Segments


@dataclass(frozen=True)
class Padded:
    """One call's frame. function: its name, for errors; segments: of all B * T slots, row after row."""

    function: str
    segments: Segments
    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, function: str, mask: Any, **columns: Any) -> Padded:
        """Frame of the mask and of the floating type that holds the columns given, float32 at least."""
        here = f"{function}: mask"
        _tensor(here, mask)
        if mask.ndim != 2:
            raise ValueError(f"{here} must be [B, T], got shape {_shape(mask)}")
        if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
            raise ValueError(f"{here} must hold 0 and 1 only (or be bool), got other values")
        rows, width = mask.shape
        seq = torch.arange(rows, device=mask.device).repeat_interleave(width)
        dtype = torch.float32
        for name, x in columns.items():
            if x is None:
                continue
            _tensor(f"{function}: {name}", x)
            if x.device != mask.device:
                raise ValueError(f"{function}: {name} is on {x.device}, mask on {mask.device}; move them together")
            if x.is_floating_point():
                dtype = torch.promote_types(dtype, x.dtype)
        return cls(function, Segments(seq, mask.bool().flatten(), rows), (rows, width), dtype)

    def tokens(self, name: str, x: Tensor) -> Tensor:
        """[B, T] -> [B * T]."""
        if tuple(x.shape) != self.shape:
            raise ValueError(f"{self.function}: {name} must have the mask's shape {list(self.shape)}, got {_shape(x)}")
        return x.to(self.dtype).flatten()

    def rows(self, name: str, x: Tensor) -> Tensor:
        """[B] -> [B]."""
        if tuple(x.shape) != self.shape[:1]:
            raise ValueError(
                f"{self.function}: {name} must have one value for each of {self.shape[0]} rows of the "
                f"mask, got shape {_shape(x)}"
            )
        return x.to(self.dtype)

    def spread(self, name: str, x: Tensor) -> Tensor:
        """[B, T], or [B] for the same at each token of a row -> [B * T]."""
        if x.ndim == 2:
            return self.tokens(name, x)
        if x.ndim != 1 or len(x) != self.shape[0]:
            rows, width = self.shape
            raise ValueError(
                f"{self.function}: {name} must be [{rows}, {width}] like the mask, or [{rows}], got shape {_shape(x)}"
            )
        return x.to(self.dtype)[self.segments.seq]

    def padded(self, x: Tensor) -> Tensor:
        """[B * T] -> [B, T]."""
        return x.view(self.shape)

    def groups(self, group_ids: Any) -> Tensor:
        """[B] prompt number of each row; None: each row has its own. group_ids: B integers or strings, in any order."""
        rows, device = self.shape[0], self.segments.mask.device
        if group_ids is None:
            return torch.arange(rows, device=device)
        ids = group_ids.tolist() if hasattr(group_ids, "tolist") else group_ids
        if not isinstance(ids, Iterable) or isinstance(ids, str):
            raise ValueError(f"{self.function}: group_ids must be a sequence, one id a row, got {group_ids!r}")
        ids = list(ids)
        if len(ids) != rows:
            raise ValueError(f"{self.function}: group_ids must have {rows} ids, one for each row, got {len(ids)}")
        odd = next((i for i in ids if not isinstance(i, (int, str, np.integer))), None)
        if odd is not None:
            raise ValueError(f"{self.function}: group_ids must be integers or strings, one a row, got {odd!r}")
        place: dict[Any, int] = {}
        return torch.tensor([place.setdefault(i, len(place)) for i in ids], dtype=torch.long, device=device)


def _tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(x).__name__}")


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
