"""Where a run's time went: seconds of a step by phase, and the share in which no model worked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

_KEEP = 10_000
"""Newest steps that medians are taken of, so that the table does not grow with the run."""


class PhaseTable:
    """Fed with the metrics of each step: `time/<phase>`, `perf/step`, `perf/idle`; within update, `perf/update_*`."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque(maxlen=_KEEP)

    def add(self, metrics: Mapping[str, float]) -> None:
        """One step."""
        names = [n for n in metrics if n.startswith(("time/", "perf/update_")) or n in ("perf/step", "perf/idle")]
        self._steps.append({n: metrics[n] for n in names})

    def lines(self) -> list[str]:
        """A head and a line for each phase: median seconds, and share of all the time; none before the first step.

        `other` is in no phase; idle are other and the waits for rewards.
        """
        if not self._steps:
            return []
        whole = [row["perf/step"] for row in self._steps]
        idle = sum(row["perf/idle"] * row["perf/step"] for row in self._steps) / sum(whole)
        phases = list(dict.fromkeys(name for row in self._steps for name in row if name.startswith("time/")))
        columns = {name[5:]: [row.get(name, 0.0) for row in self._steps] for name in phases}
        columns["other"] = [w - sum(row.get(n, 0.0) for n in phases) for w, row in zip(whole, self._steps, strict=True)]
        head = f"Seconds of a step: median {median(whole):.2f} over {len(whole)} steps, models idle {100 * idle:.0f} %"
        shares = {name: 100 * sum(column) / sum(whole) for name, column in columns.items()}
        lines = [f"  {name:12} {median(column):.2f}  {shares[name]:3.0f} %" for name, column in columns.items()]
        return [head, *(line + self._parts(name) for name, line in zip(columns, lines, strict=True))]

    def _parts(self, phase: str) -> str:
        """Medians of what a phase consists of, where that is known."""
        prefix = f"perf/{phase}_"
        names = list(dict.fromkeys(name for row in self._steps for name in row if name.startswith(prefix)))
        told = [f"{n[len(prefix) :]} {median(row.get(n, 0.0) for row in self._steps):.2f}" for n in names]
        return f"   {', '.join(told)}" if told else ""
