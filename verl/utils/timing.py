"""Seconds of each phase of a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl.core.metrics import Metrics


class StepClock:
    """`with clock("rollout"): ...` adds the seconds spent to the phase; `metrics()` reports and starts the next step.

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
        """`time/<phase>` in seconds; then the next step begins."""
        out = Metrics()
        for name, seconds in self._seconds.items():
            out.sum(f"time/{name}", seconds)
        self._seconds.clear()
        return out


def _wait_for_device() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
