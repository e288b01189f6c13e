"""Metrics as partials that merge exactly: a mean is (sum, weight), so no rank or micro-batch is averaged twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Kind = Literal["mean", "sum", "max", "min"]


class Metrics(dict[str, tuple[Kind, float, float]]):
    """Name to (kind, value, weight). For a mean, `value` is the weighted sum; otherwise weight is 1."""

    def mean(self, name: str, total: float, weight: float) -> Metrics:
        """Add `total` over `weight` counted items to the mean called `name`."""
        return self._add(name, "mean", float(total), float(weight))

    def sum(self, name: str, value: float) -> Metrics:
        return self._add(name, "sum", float(value), 1.0)

    def max(self, name: str, value: float) -> Metrics:
        return self._add(name, "max", float(value), 1.0)

    def min(self, name: str, value: float) -> Metrics:
        return self._add(name, "min", float(value), 1.0)

    def _add(self, name: str, kind: Kind, value: float, weight: float) -> Metrics:
        if name not in self:
            self[name] = (kind, value, weight)
            return self
        was, old, old_weight = self[name]
        if was != kind:
            raise TypeError(f"metric {name!r} is a {was}, not a {kind}")
        if kind in ("mean", "sum"):
            self[name] = (kind, old + value, old_weight + weight)
        else:
            self[name] = (kind, max(old, value) if kind == "max" else min(old, value), 1.0)
        return self

    @classmethod
    def merge(cls, parts: Iterable[Metrics]) -> Metrics:
        out = cls()
        for part in parts:
            for name, (kind, value, weight) in part.items():
                out._add(name, kind, value, weight)
        return out

    def values_by_name(self) -> dict[str, float]:
        """The numbers to log. A mean over nothing is left out rather than reported as 0."""
        out = {}
        for name, (kind, value, weight) in self.items():
            if kind != "mean":
                out[name] = value
            elif weight > 0:
                out[name] = value / weight
        return out
