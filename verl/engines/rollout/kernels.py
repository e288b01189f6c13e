"""The C++ kernels of cached decoding: compiled once a machine by its own compiler, called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from verl.core import RolloutError

SOURCE = Path(__file__).with_name("decode.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_WIDE = "-mprefer-vector-width=512"
_I, _P = ctypes.c_int64, ctypes.c_void_p


class Kernels:
    """The compiled functions, on CPU tensors in bf16."""

    def __init__(self, library: ctypes.CDLL):
        self._norm, self._attend, self._knows = library.rms_norm, library.attend, library.knows
        self._norm.argtypes, self._norm.restype = [_P, _I, _P, _P, _I, _I, ctypes.c_float], None
        self._attend.argtypes, self._attend.restype = [_P] * 7 + [_I] * 7, None
        self._knows.argtypes, self._knows.restype = [_I, _I], ctypes.c_int
        self._silu, self._draw = library.silu_mul, library.draw
        self._silu.argtypes, self._silu.restype = [_P, _P, _I, _I], None
        self._draw.argtypes, self._draw.restype = [_P] * 5 + [_I, _I], None

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

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int
    ) -> Tensor:
        """Rotate, write to the cache, attend. qkv [B, H + 2 KV, hd] in one piece; cos, sin [B, hd / 2]; keys, values
        [slots, KV, tokens, hd], of which slot b belongs to row b; positions [B]; window: 0 for all. -> [B, H * hd].
        """
        rows, both, dim = qkv.shape
        groups = keys.shape[1]
        heads = both - 2 * groups
        assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and keys.stride()[2:] == (dim, 1)
        assert keys.stride() == values.stride() and rows <= len(keys)
        out = torch.empty(rows, heads * dim, dtype=qkv.dtype)
        self._attend(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), keys.data_ptr(), values.data_ptr(), positions.data_ptr(),
            out.data_ptr(), rows, heads, groups, dim, keys.stride(0), keys.stride(1), window,
        )  # fmt: skip
        return out


def compiler() -> str | None:
    """A C++ compiler of this machine: $CXX, g++ or clang++."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )


@cache
def load() -> Kernels:
    """The kernels, compiled if this machine has not done so yet (seconds). RolloutError where that fails."""
    cxx = compiler()
    if cxx is None:
        raise RolloutError("rollout.compile=on needs a C++ compiler (g++ or clang++); install one, or set auto or off")
    runtime = _openmp()
    flags = [*FLAGS, *([_WIDE] if platform.machine() == "x86_64" and "clang" not in cxx else [])]
    key = hashlib.sha256(repr((SOURCE.read_bytes(), flags, cxx, runtime, _cpu())).encode()).hexdigest()[:16]
    file = _folder() / f"decode-{key}.so"
    if not file.is_file():
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        # Linked to the OpenMP that torch uses: a second one would fight it for the cores.
        command = [cxx, *flags, str(SOURCE), "-o", str(draft), *([runtime] if runtime else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RolloutError(
                f"rollout.compile: {cxx} failed on {SOURCE.name} ({last[:200]}); set rollout.compile=off"
            )
        draft.replace(file)
    return Kernels(ctypes.CDLL(str(file)))


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _openmp() -> str | None:
    """The OpenMP runtime in this process, as a file."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    names = {line.split()[-1] for line in lines if "omp" in Path(line.split()[-1]).name and ".so" in line}
    return min(names) if names else None


def _cpu() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
