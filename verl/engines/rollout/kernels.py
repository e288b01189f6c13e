"""The C++ kernels of cached decoding: compiled once a machine by its own compiler, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from verl.models.compiler import compiled

__all__ = ["Kernels", "Packed", "Places", "library", "load"]
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("decode.cpp", "product.cpp", "layers.cpp"))
_WIDE, _HALF = 32, 16
_I, _P = ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True)
class Packed:
    """Weights of one input, laid out by `Kernels.pack`: blocks, n outputs of k inputs, bias [n] or None.

    gated: the outputs are gates and what they gate, by sixteens.
    """

    blocks: Tensor
    n: int
    k: int
    bias: Tensor | None
    gated: bool


@dataclass(frozen=True)
class Places:
    """Where rows lie in a cache, int64 [B]: row b is token positions[b] of slots[b] and the copies[b] - 1 behind it."""

    slots: Tensor
    copies: Tensor
    positions: Tensor


class Kernels:
    """The compiled functions, on CPU tensors in bf16."""

    def __init__(self, library: ctypes.CDLL):
        self._norm, self._attend, self._knows = library.rms_norm, library.attend, library.knows
        self._norm.argtypes, self._norm.restype = [_P, _I, _P, _P, _I, _I, ctypes.c_float], None
        self._attend.argtypes, self._attend.restype = [_P] * 9 + [_I] * 7, None
        self._knows.argtypes, self._knows.restype = [_I, _I], ctypes.c_int
        self._silu, self._draw = library.silu_mul, library.draw
        self._silu.argtypes, self._silu.restype = [_P, _P, _I, _I], None
        self._draw.argtypes, self._draw.restype = [_P] * 5 + [_I, _I], None

        self._pack, self._multiply = library.pack, library.multiply
        self._pack.argtypes, self._pack.restype = [_P, _I, _I, _P, _I, _I], None
        self._multiply.argtypes, self._multiply.restype = [_P, _I, _P, _P, _P, _I, _I, _I, _I], None
        library.multiplies.restype = ctypes.c_int
        self.multiplies = bool(library.multiplies())
        """Whether `pack` and `multiply` work on this processor."""

    def knows(self, dim: int, share: int) -> bool:
        """Whether `attend` takes heads of this size, `share` query heads to a key head."""
        return bool(self._knows(dim, share))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [R, D] (any row stride) / sqrt(mean(x^2) + eps) * weight -> [R, D]."""
        rows, size = x.shape
        out = torch.empty(rows, size, dtype=x.dtype)
        self._norm(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), rows, size, eps)
        return out

    def silu_mul(self, both: Tensor) -> Tensor:
        """both [R, 2 D], gates first, in one piece -> silu(gate) * up [R, D]."""
        rows, size = both.shape
        out = torch.empty(rows, size // 2, dtype=both.dtype)
        self._silu(both.data_ptr(), out.data_ptr(), rows, size // 2)
        return out

    def draw(self, logits: Tensor, temperature: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """logits [B, V] bf16, temperature [B] fp32 above 0, u [B] fp64 in [0, 1) -> token ids [B] (-1: not finite) and
        their log-probs [B] fp32.
        """
        rows, vocab = logits.shape
        assert logits.is_contiguous() and temperature.dtype == torch.float32 and u.dtype == torch.float64
        ids, logps = torch.empty(rows, dtype=torch.int64), torch.zeros(rows)
        self._draw(
            logits.data_ptr(), temperature.data_ptr(), u.data_ptr(), ids.data_ptr(), logps.data_ptr(), rows, vocab
        )  # fmt: skip
        return ids, logps

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], gated: bool = False) -> Packed:
        """Lay out weights [n_i, k] of one input as one, in this order; gated: two of them, by turns. Every n_i but
        the last must be a multiple of 16, and k even.
        """
        k, n = weights[0].shape[1], sum(len(w) for w in weights)
        blocks = torch.zeros if n % _WIDE else torch.empty
        out = blocks(-(-n // _WIDE), k // 2, _WIDE, 2, dtype=torch.bfloat16)
        first = 0
        for weight in weights:
            assert weight.is_contiguous() and k % 2 == 0
            self._pack(weight.data_ptr(), len(weight), k, out.data_ptr(), first, 2 if gated else 1)
            first += 1 if gated else len(weight) // _HALF
        return Packed(out, n, k, _joined(biases, gated), gated)

    def multiply(self, x: Tensor, w: Packed, onto: Tensor | None = None) -> Tensor:
        """x [R, k] (any row stride) W^T + b -> [R, n]; of gated weights silu(gate) * up [R, n / 2]. onto [R, n]: added
        to it, in place.
        """
        rows = len(x)
        assert x.shape[1] == w.k and x.stride(1) == 1 and not (w.gated and onto is not None)
        out = torch.empty(rows, w.n // 2 if w.gated else w.n, dtype=x.dtype) if onto is None else onto
        assert out.is_contiguous()
        how = 2 if w.gated else 0 if onto is None else 1
        bias = None if w.bias is None else w.bias.data_ptr()
        self._multiply(x.data_ptr(), x.stride(0), w.blocks.data_ptr(), bias, out.data_ptr(), rows, w.n, w.k, how)
        return out

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, places: Places, window: int
    ) -> Tensor:
        """Rotate, write to the cache, attend. qkv [B, H + 2 KV, hd] in one piece; cos, sin [B, hd / 2]; keys, values
        [slots, KV, tokens, hd]; places: of the rows in them; window: 0 for all. -> [B, H * hd].
        """
        rows, both, dim = qkv.shape
        groups = keys.shape[1]
        heads = both - 2 * groups
        assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and keys.stride()[2:] == (dim, 1)
        assert keys.stride() == values.stride() and rows == len(places.slots)
        out = torch.empty(rows, heads * dim, dtype=qkv.dtype)
        at = (places.slots.data_ptr(), places.copies.data_ptr(), places.positions.data_ptr())
        shape = (rows, heads, groups, dim, keys.stride(0), keys.stride(1), window)
        inputs = (x.data_ptr() for x in (qkv, cos, sin, keys, values))
        self._attend(*inputs, *at, out.data_ptr(), *shape)
        return out


def _joined(biases: Sequence[Tensor | None], gated: bool) -> Tensor | None:
    known = [b for b in biases if b is not None]
    if not known:
        return None
    if gated:
        return torch.stack([b.view(-1, _HALF) for b in known], 1).flatten()
    return torch.cat(known)


def library() -> ctypes.CDLL:
    """The compiled sources. CompileError where they cannot be compiled."""
    return compiled("decode", _SOURCES)


@cache
def load() -> Kernels:
    """The kernels, compiled if need be. CompileError where that fails."""
    return Kernels(library())
