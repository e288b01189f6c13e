"""Products of the cached decoder on a CPU in bf16: the weights of one input as one product, and what follows it.

Two ways, same numbers to rounding: oneDNN's, on the weights as they lie or on a copy in its own order; and
`product.cpp`, on a copy in its order, where the processor has bf16 in AVX-512 and oneDNN nothing faster (AMX).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from verl.engines.rollout.kernels import Kernels, Packed

_ROWS = 32
"""Number of rows that oneDNN's layout is chosen for; any number works."""


class Product(Protocol):
    """x [R, K] -> [R, N]."""

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b; of a gate and up projection silu(gate) * up."""

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """x W^T + b + residual, which may be written into."""


@dataclass(frozen=True)
class Native:
    """By `product.cpp`."""

    kernels: Kernels
    packed: Packed

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.multiply(x, self.packed)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.kernels.multiply(x, self.packed, residual)


@dataclass(frozen=True)
class OneDNN:
    """By oneDNN, each weight for itself."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    def __call__(self, x: Tensor) -> Tensor:
        parts = [
            torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")
            for w, b in zip(self.weights, self.biases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        (weight,), (bias,) = self.weights, self.biases
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


@dataclass(frozen=True)
class OneDNNGated(OneDNN):
    """Gate and up: two products, the activation part of the first and the gating of the second; or, packed, one."""

    kernels: Kernels | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.weights) == 1:
            assert self.kernels is not None
            return self.kernels.silu_mul(super().__call__(x))
        (gate, up), (gate_bias, up_bias) = self.weights, self.biases
        gated = torch.ops.mkldnn._linear_pointwise(x, gate, gate_bias, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, gated, up, up_bias, "mul")


@dataclass(frozen=True)
class Layout:
    """How weights become products. pack: a copy laid out for it; else the weights as they lie."""

    kernels: Kernels | None
    pack: bool

    def of(self, linears: Sequence[nn.Linear]) -> Product:
        """Projections of one input, side by side."""
        weights, biases = [x.weight.detach() for x in linears], _biases(linears)
        if self._native(weights):
            return Native(self.kernels, self.kernels.pack(weights, biases))  # type: ignore[union-attr,arg-type]
        if not self.pack:
            return OneDNN(tuple(weights), biases)
        return OneDNN((_reordered(torch.cat(weights)),), (_cat(biases),))

    def gated(self, gate: nn.Linear, up: nn.Linear) -> Product:
        """silu(gate) * up."""
        weights, biases = [gate.weight.detach(), up.weight.detach()], _biases([gate, up])
        if self._native(weights):
            return Native(self.kernels, self.kernels.pack(weights, biases, gated=True))  # type: ignore[union-attr,arg-type]
        if not self.pack or self.kernels is None:
            ready = [_reordered(w) for w in weights] if self.pack else weights
            return OneDNNGated(tuple(ready), biases, self.kernels)
        return OneDNNGated((_reordered(torch.cat(weights)),), (_cat(biases),), self.kernels)

    def head(self, weight: Tensor) -> Product:
        """The output matrix."""
        if self._native([weight]):
            return Native(self.kernels, self.kernels.pack([weight], [None]))  # type: ignore[union-attr,arg-type]
        return OneDNN((_reordered(weight) if self.pack else weight,), (None,))

    def _native(self, weights: Sequence[Tensor]) -> bool:
        """Whether `product.cpp` is to take them."""
        if not self.pack or self.kernels is None or not self.kernels.multiplies or amx():
            return False
        return weights[0].shape[1] % 2 == 0 and all(len(w) % 16 == 0 for w in weights[:-1])


def amx() -> bool:
    """Whether this processor multiplies by tiles (AMX), which oneDNN uses."""
    return bool(torch.cpu._is_amx_tile_supported())


def _biases(linears: Sequence[nn.Linear]) -> tuple[Tensor | None, ...]:
    return tuple(None if x.bias is None else x.bias.detach() for x in linears)


def _cat(biases: Sequence[Tensor | None]) -> Tensor | None:
    known = [b for b in biases if b is not None]
    return torch.cat(known) if known else None


def _reordered(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
