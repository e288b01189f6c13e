"""Seconds of each phase of a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl.core.metrics import Metrics

WAITING = ("reward",)
"""Phases in which outside code works, and no model."""


class StepClock:
    """`with clock("rollout"): ...` adds the seconds spent to the phase; `metrics()` reports and starts the next step.

    A step begins where the clock is made, or where the last one was reported.

    on_phase: told the phase's name when it begins, and the outer phase (or None) when it ends; a progress view uses it.
    Device work is waited for at both ends of a phase, so that a phase pays for its own kernels.
    """

    def __init__(
        self, on_phase: Callable[[str | None], None] | None = None, now: Callable[[], float] = time.perf_counter
    ):
        self._on_phase = on_phase or (lambda name: None)
        self._now = now
        self._running: list[str] = []
        self._seconds: dict[str, float] = {}
        self._began = self._now()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        _wait_for_device()
        self._running.append(name)
        self._on_phase(name)
        start = self._now()
        try:
            yield
        finally:
            _wait_for_device()
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
            self._running.pop()
            self._on_phase(self._running[-1] if self._running else None)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, of the step that is going on."""
        return dict(self._seconds)

    def metrics(self) -> Metrics:
        """`time/<phase>` and `perf/step`, all of the step, in seconds, and `perf/idle`, the share of it in which no
        model worked: outside of phases, and in those of WAITING. Then the next step begins. A phase within a phase
        would be counted twice.
        """
        now, out = self._now(), Metrics()
        for name, seconds in self._seconds.items():
            out.sum(f"time/{name}", seconds)
        whole = now - self._began
        worked = sum(seconds for name, seconds in self._seconds.items() if name not in WAITING)
        out.sum("perf/step", whole).mean("perf/idle", max(0.0, whole - worked), whole)
        self._seconds, self._began = {}, now
        return out


@contextmanager
def timed(metrics: Metrics, name: str) -> Iterator[None]:
    """The seconds of a block, its work on the device included, as `name`; of several processes the slowest counts."""
    _wait_for_device()
    start = time.perf_counter()
    yield
    _wait_for_device()
    metrics.max(name, time.perf_counter() - start)


def _wait_for_device() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
