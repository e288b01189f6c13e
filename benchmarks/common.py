"""What the benchmarks share: the lines above a table, the peaks of this machine, and the arithmetic of a report."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_MATRIX_SIZES = (2048, 4096)
_READ_BYTES = 1 << 29
_REPEATS = 6


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum of repeated measurements."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), median(values), max(values))

    def cells(self, width: int = 9, digits: int = 3) -> str:
        """Three columns of a table."""
        return "".join(f"{v:>{width}.{digits}f}" for v in (self.low, self.middle, self.high))


def ratio(ours: float, theirs: float) -> float:
    """How many times as fast: 2.0 where ours takes half of theirs (both in seconds)."""
    return theirs / ours


def rate_share(amount: float, seconds: float, peak: float) -> float:
    """Share of `peak` (per second) that `amount` in `seconds` reached."""
    return amount / (seconds * peak)


@dataclass(frozen=True)
class Peaks:
    """What this machine reached in this process: FLOP/s of a large square product, bytes/s of a read."""

    matrix: float
    memory: float

    @classmethod
    def measure(cls, device: str, dtype: str) -> Peaks:
        """Best of some repeats; a few seconds. device: cpu or cuda; dtype: bfloat16 or float32."""
        import torch

        matrix = 0.0
        for size in _MATRIX_SIZES:
            a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
            out = torch.empty_like(a)
            product = _Product(a, out)
            matrix = max(matrix, 2.0 * size**3 / best_seconds(product, device))
        data = torch.ones(_READ_BYTES // 4, device=device)  # zeros would all lie on one page
        return cls(matrix, _READ_BYTES / best_seconds(data.sum, device))

    def best(self, other: Peaks) -> Peaks:
        """The higher of both, for peaks measured before and after the runs."""
        return Peaks(max(self.matrix, other.matrix), max(self.memory, other.memory))

    def line(self, dtype: str) -> str:
        return f"peaks     {self.matrix / 1e9:,.0f} GFLOP/s ({dtype} product), {self.memory / 1e9:.1f} GB/s read"


@dataclass(frozen=True)
class _Product:
    """a @ a into a buffer that exists: the first touch of memory is no part of a product."""

    a: Any
    out: Any

    def __call__(self) -> None:
        import torch

        torch.mm(self.a, self.a, out=self.out)


def best_seconds(work: Callable[[], object], device: str = "cpu", repeats: int = _REPEATS) -> float:
    """Shortest of some repeats, after one that does not count."""
    return min(seconds_of(work, device) for _ in range(repeats + 1))


def seconds_of(work: Callable[[], object], device: str = "cpu") -> float:
    """Wall-clock seconds of one call, its device work included."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def wait(device: str) -> None:
    """Let queued device work end."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def by_turns(sides: Mapping[str, Callable[[int], Any]], runs: int, warm_up: int = 1) -> dict[str, list[Any]]:
    """What each side returned in `runs` turns, after `warm_up` turns that are left out. Each turn is told on stderr."""
    seen: dict[str, list[Any]] = {name: [] for name in sides}
    for turn in range(1 - warm_up, runs + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            result = side(turn)
            note = f"turn {turn}" if turn > 0 else "warm-up"
            print(f"{note}: {name} {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
            if turn > 0:
                seen[name].append(result)
    return seen


def child(command: Sequence[str]) -> dict[str, Any]:
    """The JSON in the last line of a child's output. Where it failed, its own message stands and its code is ours."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode < 0:
        raise SystemExit(f"error: {' '.join(command[1:])} was killed by signal {-done.returncode}")
    if done.returncode:
        raise SystemExit(done.returncode)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def header(versions: dict[str, str], device: str = "cpu") -> str:
    """Machine, versions and command, one line each. versions: of what runs elsewhere, beside our own."""
    import torch
    import transformers

    import verl

    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    own = {"verl": verl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    command = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    return "\n".join(
        [
            f"machine   {name}, {torch.get_num_threads()} threads, {platform.system()} {platform.release()}",
            "versions  " + ", ".join(f"{k} {v}" for k, v in (own | versions).items()),
            f"command   {command}",
        ]
    )


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
