"""Padded [B, T] tensors checked and seen as flat segments: every slot is a token, and the mask says which count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AnySet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.functional.given import computed_in, shown, tensor, together, zeros_and_ones
from verl.algos.segments import Segments


@dataclass(frozen=True)
class Padded:
    """One call's frame. function: its name, for errors; segments: of all B * T slots, row after row."""

    function: str
    segments: Segments
    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, function: str, mask: Any, optional: Mapping[str, Any] | None = None, **columns: Any) -> Padded:
        """Frame of the mask and of the floating type that holds the columns given, float32 at least.

        optional: columns that may be None; the others must be tensors.
        """
        here = f"{function}: mask"
        zeros_and_ones(here, mask)
        if mask.ndim != 2:
            raise ValueError(f"{here} must be [B, T], got shape {_shape(mask)}")
        rows, width = mask.shape
        seq = torch.arange(rows, device=mask.device).repeat_interleave(width)
        columns |= {name: x for name, x in (optional or {}).items() if x is not None}
        for name, x in columns.items():
            tensor(f"{function}: {name}", x)
            together(f"{function}: {name}", x, "mask", mask)
        dtype = computed_in(*columns.values())
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
        if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes)):
            raise ValueError(f"{self.function}: group_ids must be a sequence, one id a row, got {shown(group_ids)}")
        if isinstance(ids, (AnySet, Mapping)):
            kind = type(ids).__name__
            raise ValueError(f"{self.function}: group_ids must be a sequence in the order of the rows, got a {kind}")
        ids = list(ids)
        if len(ids) != rows:
            raise ValueError(f"{self.function}: group_ids must have {rows} ids, one for each row, got {len(ids)}")
        odd = [i for i in ids if not isinstance(i, (int, str, np.integer))]
        if odd:
            raise ValueError(f"{self.function}: group_ids must be integers or strings, one a row, got {shown(odd[0])}")
        place: dict[Any, int] = {}
        return torch.tensor([place.setdefault(i, len(place)) for i in ids], dtype=torch.long, device=device)


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
