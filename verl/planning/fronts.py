"""Choices that no other beats in every respect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from verl.planning.pool import Pool, Seat

T = TypeVar("T")


def useful(seats: Sequence[Seat]) -> list[Seat]:
    """Without those that another beats in memory and in time."""
    return [s for (s,) in front([(s,) for s in seats], False)]


def front(groups: Sequence[tuple[Seat, ...]], alone: bool) -> list[tuple[Seat, ...]]:
    """Groups that no other beats in what is kept, what passes, scoring and training; alone: there is no other pool to
    wait for, so that only the sum of the two counts.
    """

    def marks(g: tuple[Seat, ...]) -> tuple[float, ...]:
        passing = max((s.passing for s in g), default=0.0)
        score, train = sum(s.score_s for s in g), sum(s.train_s for s in g)
        return (sum(s.kept for s in g), passing, *((score + train,) if alone else (score, train)))

    return [g for _, g in _undominated([(marks(g), g) for g in groups])]


def shortest(pools: Sequence[Pool | None], alone: bool) -> list[Pool]:
    """Of those that fit the ones that no other beats in seconds of any stage, or alone in their sum."""
    there = [pool for pool in pools if pool is not None]
    if alone:
        return [min(there, key=lambda p: p.first + p.score + p.train)] if there else []
    return [p for _, p in _undominated([((p.first, p.score, p.train), p) for p in there])]


def _undominated(marked: Sequence[tuple[tuple[float, ...], T]]) -> list[tuple[tuple[float, ...], T]]:
    """Those whose marks no other's are all at most; of equals the first."""
    out: list[tuple[tuple[float, ...], T]] = []
    for marks, item in sorted(marked, key=lambda m: m[0]):
        if not any(all(a <= b for a, b in zip(other, marks, strict=True)) for other, _ in out):
            out.append((marks, item))
    return out
