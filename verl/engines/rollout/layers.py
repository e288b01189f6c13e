"""All layers of the decoder as one call of `layers.cpp`, where every product of them is `product.cpp`'s."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.engines.rollout.kernels import Packed, Places, library
from verl.models.config import DecoderConfig

_WEIGHTS = ("norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "mlp_norm", "gated", "gated_bias", "down")
_POINTERS = (*_WEIGHTS, "down_bias", "keys", "values")
_SIZES = ("layers", "rows", "hidden", "inner", "heads", "groups", "dim")


class _Layer(ctypes.Structure):
    _fields_ = [*((n, ctypes.c_void_p) for n in _POINTERS), *((n, ctypes.c_int64) for n in ("slot", "group", "window"))]


class _Shape(ctypes.Structure):
    _fields_ = [*((n, ctypes.c_int64) for n in _SIZES), ("eps", ctypes.c_float)]


class Layers:
    """Holds the packed weights of all layers. `add` them in order; then call."""

    def __init__(self, config: DecoderConfig):
        c = self._config = config
        self._table = (_Layer * c.num_layers)()
        sizes = (c.num_layers, 0, c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim)
        self._shape = _Shape(*sizes, c.rms_eps)
        self._held: list[Any] = []
        self._run = library().layers
        self._run.argtypes, self._run.restype = [ctypes.c_void_p] * 12, None

    def add(self, layer: Any, qkv: Packed, out: Packed, gated: Packed, down: Packed) -> None:
        """layer: of the decoder; its norms are read where they lie."""
        row, attention = self._table[len(self._held)], layer.self_attn
        row.norm, row.mlp_norm = _at(layer.input_layernorm.weight), _at(layer.post_attention_layernorm.weight)
        if attention.qk_norm:
            row.q_norm, row.k_norm = _at(attention.q_norm.weight), _at(attention.k_norm.weight)
        for name, packed in (("qkv", qkv), ("out", out), ("gated", gated), ("down", down)):
            setattr(row, name, _at(packed.blocks))
            setattr(row, f"{name}_bias", None if packed.bias is None else _at(packed.bias))
        self._held.append((layer, qkv, out, gated, down))

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        places: Places,
        cache_of: Callable[[int], tuple[Tensor, Tensor, int | None]],
    ) -> Tensor:
        """x [R, D], which is written over; cos, sin [R, hd / 2]; cache_of(layer): keys, values, window. -> [R, D]."""
        c, rows = self._config, len(x)
        for number, row in enumerate(self._table):
            keys, values, window = cache_of(number)
            row.keys, row.values, row.window = _at(keys), _at(values), window or 0
            row.slot, row.group = keys.stride(0), keys.stride(1)
        queries = c.num_heads * c.head_dim
        widths = (c.hidden_size, queries + 2 * c.num_kv_heads * c.head_dim, queries, c.intermediate_size)
        room = [torch.empty(rows, width, dtype=x.dtype) for width in widths]
        assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and len(places.slots) == rows
        self._shape.rows = rows
        tensors = (x, *room, cos, sin, places.slots, places.copies, places.positions)
        self._run(ctypes.addressof(self._table), ctypes.addressof(self._shape), *(_at(t) for t in tensors))
        return x


def _at(x: Tensor) -> int:
    return x.data_ptr()
