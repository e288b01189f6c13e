"""Which sequences go to which data-parallel rank: a pure, balanced partition, and arguments that are cut by it."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

Parts = Sequence[Sequence[int]]
"""Sequence numbers of each part, ascending within one; every sequence is in exactly one part."""


def partition(lengths: Sequence[int], parts: int, groups: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Cut sequences of `lengths` tokens into `parts` of about equal tokens; some are empty where there are too few.

    groups: of each sequence; those of one group stay in one part. The longest goes to the part with the fewest tokens,
    so no part has more than the mean and one longest sequence (or group). The same input gives the same parts.
    """
    assert parts >= 1 and (groups is None or len(groups) == len(lengths))
    units: dict[Hashable, list[int]] = {}
    for i in range(len(lengths)):
        units.setdefault(i if groups is None else groups[i], []).append(i)
    loads = sorted((-sum(lengths[i] for i in unit), unit) for unit in units.values())
    heap = [(0, part) for part in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for load, unit in loads:
        tokens, part = heap[0]
        heapq.heapreplace(heap, (tokens - load, part))
        out[part] += unit
    return [sorted(part) for part in out]


def order(parts: Parts) -> list[int]:
    """Where each sequence lies when the parts are put behind each other: `joined.take(order(parts))` is the batch."""
    places = {i: place for place, i in enumerate(i for part in parts for i in part)}
    return [places[i] for i in range(len(places))]


class Splits(ABC):
    """An argument of a call that is about the batch's sequences, and so is cut as the batch is."""

    @abstractmethod
    def split(self, parts: Parts) -> Sequence[Any]:
        """One value a part, with the sequence numbers that hold within it."""
