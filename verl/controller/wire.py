"""What travels between the controller and its processes: bytes, so that they can be counted."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """One part of one batch: batch numbers grow; `part` of `parts` equal ranks' worth, cut with groups whole or not."""

    batch: int
    parts: int
    part: int
    together: bool


@dataclass(frozen=True)
class Request:
    """A call for one process. sent: columns that do not lie there yet; names: all that the method sees."""

    role: str
    method: str
    kwargs: Mapping[str, Any]
    answers: bool
    shard: Shard | None = None
    cu_seqlens: Tensor | None = None
    sent: Mapping[str, Tensor] | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reply:
    """value: what the method returned, None where this rank does not answer; start: when the rank began, as time.time()
    has it there; seconds: that it took.

    stored: the columns that it returned and that stay there; error, traceback: set where it raised.
    """

    value: Any = None
    start: float = 0.0
    seconds: float = 0.0
    stored: tuple[str, ...] = ()
    error: str = ""
    traceback: str = ""


class _Pickler(pickle.Pickler):
    """Tensors go as plain memory; they arrive as plain tensors on the host, without a gradient."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        plain = obj.detach().cpu().contiguous()
        if plain.dtype == torch.bfloat16:  # numpy has no such type
            return _bfloat16, (plain.view(torch.int16).numpy(),)
        return _tensor, (plain.numpy(),)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _bfloat16(array: np.ndarray) -> Tensor:
    return _tensor(array).view(torch.bfloat16)


def encode(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(value)
    return out.getvalue()


def decode(data: bytes) -> Any:
    return pickle.loads(data)
