"""The C++ kernels of training on a CPU in bf16, called through ctypes; `fused.py` tells autograd of them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.models.compiler import choose, compiled
from verl.models.law import Law
from verl.models.ragged import Ragged

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("attention.cpp", "steps.cpp", "bf16.h"))
_CHUNK = 64
"""Rows of one part of a norm weight's gradient, as in steps.cpp."""
_PLAIN = (Tensor, torch.nn.Parameter)
_I, _P, _F = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_SIGNATURES = {
    "attend_forward": [_P] * 3,
    "attend_backward": [_P] * 9 + [_I],
    "norm_forward": [_P] * 4 + [_I, _I, _F],
    "norm_backward": [_P] * 6 + [_I, _I],
    "gate_forward": [_P] * 3 + [_I],
    "gate_backward": [_P] * 5 + [_I],
    "turn": [_P] * 4 + [_I] * 3 + [_F],
    "law_forward": [_P, _I, _I, _F] + [_P] * 3,
    "law_backward": [_P, _I, _I, _F] + [_P] * 7,
}


class _Problems(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("count", "heads", "groups", "dim", "window")),
        *((name, _P) for name in ("query_at", "key_at", "query", "key", "seen", "q", "k", "v")),
        *((name, _I) for name in ("q_stride", "k_stride", "v_stride")),
    ]


class Kernels:
    """The compiled functions, on contiguous tensors that `takes` is true of."""

    def __init__(self, library: ctypes.CDLL):
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._c = library

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or in another process, is that process's own."""
        return load, ()

    def takes(self, *tensors: Tensor) -> bool:
        """Whether these are plain bf16 on the CPU: a module may have been moved since it was loaded."""
        return all(type(x) in _PLAIN and x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in tensors)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x [..., D] / sqrt(mean(x^2) + eps) * weight, and 1 / sqrt(mean(x^2) + eps) [rows] fp32."""
        size = x.shape[-1]
        out, scale = torch.empty_like(x), _fp32(x.numel() // size)
        self._c.norm_forward(_at(x), _at(weight), _at(out), _at(scale), len(scale), size, eps)
        return out, scale

    def norm_backward(self, x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and weight."""
        rows, size = len(scale), x.shape[-1]
        grad_x, parts = torch.empty_like(x), _fp32(-(-rows // _CHUNK), size)
        given = (x, weight, scale, grad, grad_x, parts)
        self._c.norm_backward(*map(_at, given), rows, size)
        return grad_x, parts.sum(0).to(weight.dtype)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        out = torch.empty_like(gate)
        self._c.gate_forward(_at(gate), _at(up), _at(out), gate.numel())
        return out

    def gate_backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        self._c.gate_backward(*map(_at, (gate, up, grad, grad_gate, grad_up)), gate.numel())
        return grad_gate, grad_up

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        """x [P, H, hd] rotated by the angles cos, sin [P, 1, hd / 2], the second times `sign`."""
        rows, heads, dim = x.shape
        out = torch.empty_like(x)
        self._c.turn(*map(_at, (x, cos, sin, out)), rows, heads, dim, sign)
        return out

    def attend(self, problems: Ragged, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [P, H, hd], k and v [P, KV, hd] -> [P, H, hd], and the log of each query's sum [queries, H] fp32."""
        out, norm = torch.empty_like(q), _fp32(len(problems.query), q.shape[1])
        given = _problems(problems, q, k, v)
        self._c.attend_forward(ctypes.addressof(given), _at(out), _at(norm))
        return out, norm

    def attend_backward(
        self, problems: Ragged, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, norm: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        q, k, v = qkv
        given, grads = _problems(problems, q, k, v), [torch.empty_like(x) for x in qkv]
        if problems.disjoint:
            ours = (out, grad, norm, *grads)
            self._c.attend_backward(ctypes.addressof(given), *map(_at, ours), None, None, len(q))
        else:
            parts, sums = _fp32(2, len(problems.key), *k.shape[1:]), _fp32(2, *k.shape).zero_()
            ours = (out, grad, norm, *grads, parts, sums)
            self._c.attend_backward(ctypes.addressof(given), *map(_at, ours), len(q))
            grads[1:] = sums.to(k.dtype).unbind()
        return grads[0], grads[1], grads[2]

    def law(self, z: Tensor, temperature: float, entropy: bool, squares: bool) -> Law:
        """z [U, V]: logits."""
        assert z.is_contiguous()
        norm, more = _fp32(len(z)), [_fp32(len(z)) if asked else None for asked in (entropy, squares)]
        self._c.law_forward(_at(z), *z.shape, temperature, _at(norm), *(None if x is None else _at(x) for x in more))
        return Law(norm, *more)

    def law_backward(
        self,
        z: Tensor,
        temperature: float,
        law: Law,
        rows: tuple[Tensor, Tensor, Tensor],
        of_entropy: Tensor | None,
    ) -> Tensor:
        """Gradient of z. rows: gradients [R] fp32 of the log-probs of targets [R], by state; where those of each state
        begin [U + 1]; a target of -1 has no logit here. of_entropy: gradient [U] of the entropy.
        """
        out = torch.empty_like(z)
        of_row, target, begin = rows
        if len(target) and not -1 <= int(target.min()) <= int(target.max()) < z.shape[1]:
            raise IndexError(f"a token id is outside of the {z.shape[1]} of the vocabulary")
        entropies = (None, None) if of_entropy is None else (law.entropy, of_entropy)
        entropy, slope = (None if x is None else _at(x) for x in entropies)
        more = (_at(law.norm), entropy, _at(of_row), slope, _at(target), _at(begin), _at(out))
        self._c.law_backward(_at(z), *z.shape, temperature, *more)
        return out


def _problems(p: Ragged, q: Tensor, k: Tensor, v: Tensor) -> _Problems:
    if len(q) != len(p.query) or len(k) != len(q) or len(v) != len(q):
        raise IndexError(f"attention of {len(p.query)} tokens was given {len(q)}, {len(k)} and {len(v)}")
    at = (_at(x) for x in (p.query_at, p.key_at, p.query, p.key, p.seen_at, q, k, v))
    shape = (len(p.query_at) - 1, q.shape[1], k.shape[1], q.shape[2], p.window or 0)
    return _Problems(*shape, *at, q.stride(0), k.stride(0), v.stride(0))


def _fp32(*shape: int) -> Tensor:
    """Room that C++ writes to, whatever the default dtype and device are."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


def _at(x: Tensor) -> int:
    return x.data_ptr()


@cache
def load() -> Kernels:
    """The kernels, compiled if need be. CompileError where that fails."""
    return Kernels(compiled("train", _SOURCES))


def chosen(compile: str, dtype: torch.dtype, device: torch.device | str) -> tuple[Kernels | None, str]:
    """(the kernels, or None; why not, where that is worth a word). ConfigError where model.compile=on cannot be."""
    return choose(compile, "model.compile", unfit(dtype, device), load)


def unfit(dtype: torch.dtype, device: torch.device | str) -> str | None:
    """Why a native model of this kind cannot use them."""
    fits = dtype == torch.bfloat16 and torch.device(device).type == "cpu"
    return None if fits else f"the kernels are for bfloat16 on a CPU, this is {str(dtype)[6:]} on {device}"
