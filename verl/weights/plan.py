"""The resharding plan: which rank sends which box of which tensor to whom. Pure; knows no process and no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heapreplace

from verl.core.errors import WeightsError
from verl.weights.boxes import Box, intersect, numel, subtract


@dataclass(frozen=True)
class Shard:
    """`rank` holds, or wants to hold, `box` of the tensor `name`; one box a rank and name."""

    rank: int
    name: str
    box: Box


@dataclass(frozen=True)
class Transfer:
    """`dst` gets `box` of `name` from `src`; src == dst: from its own memory."""

    name: str
    src: int
    dst: int
    box: Box

    @property
    def numel(self) -> int:
        return numel(self.box)


def plan(src: Iterable[Shard], dst: Iterable[Shard]) -> tuple[Transfer, ...]:
    """Every element of every destination shard exactly once: from own memory where it is there, else from the holder
    that has the fewest elements to send so far (the lowest rank among equals). The same shards give the same plan, so
    each rank makes it for itself.

    Cost: per name, its distinct boxes on both sides, and the transfers that come out. Replicas share that work.
    WeightsError: part of a destination shard is held by nobody, or a rank holds two boxes of one name.
    """
    holders = _Holders(src)
    return tuple(transfer for want in dst for transfer in holders.fetch(want))


class _Holders:
    """Who holds what, by name, and how much each was asked for."""

    def __init__(self, shards: Iterable[Shard]):
        self._own: dict[tuple[int, str], Box] = {}
        holders: dict[str, dict[Box, list[int]]] = {}
        for shard in shards:
            if (shard.rank, shard.name) in self._own:
                raise WeightsError(f"{shard.name}: rank {shard.rank} holds two shards of it; make them one box")
            self._own[shard.rank, shard.name] = shard.box
            holders.setdefault(shard.name, {}).setdefault(shard.box, []).append(shard.rank)
        self._by_name = {
            name: [(box, tuple(sorted(ranks))) for box, ranks in sorted(boxes.items())]
            for name, boxes in holders.items()
        }
        self._parts: dict[tuple[str, Box], list[_Part]] = {}
        self._load = _Load()

    def fetch(self, want: Shard) -> Iterator[Transfer]:
        """The transfers that make up one destination shard."""
        held = self._own.get((want.rank, want.name))
        own = intersect(want.box, held) if held is not None else None
        if own is not None:
            yield Transfer(want.name, want.rank, want.rank, own)
        for box, ranks in self._parts_of(want.name, want.box):
            for rest in [box] if own is None else subtract(box, own):
                yield Transfer(want.name, self._load.take(ranks, numel(rest)), want.rank, rest)

    def _parts_of(self, name: str, box: Box) -> list[_Part]:
        """`box` as disjoint parts, each with all ranks that hold it; the same for every replica that wants it."""
        if (name, box) not in self._parts:
            self._parts[name, box] = _cut(name, box, self._by_name.get(name, []))
        return self._parts[name, box]


_Part = tuple[Box, tuple[int, ...]]


def _cut(name: str, box: Box, sources: Iterable[_Part]) -> list[_Part]:
    missing, found = [box], list[_Part]()
    for source, ranks in sources:
        if intersect(box, source) is None:
            continue
        apart: list[_Part] = []
        for part, holders in found:  # sources may overlap: then what both hold becomes a part of its own
            both = intersect(part, source)
            if both is None:
                apart.append((part, holders))
            else:
                apart += [(rest, holders) for rest in subtract(part, both)]
                apart.append((both, tuple(sorted({*holders, *ranks}))))
        apart += [(hit, ranks) for part in missing if (hit := intersect(part, source)) is not None]
        missing = [rest for part in missing for rest in subtract(part, source)]
        found = apart
    if missing:
        raise WeightsError(f"{name}: no rank holds {missing[0]} of it, which generation needs")
    return found


class _Load:
    """Elements that each rank has to send, and the least loaded of any set of ranks without a look at all of them."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def take(self, ranks: tuple[int, ...], elements: int) -> int:
        """The least loaded of `ranks`, which now sends so many elements more."""
        if ranks not in self._heaps:
            self._heaps[ranks] = [(self._sent.get(rank, 0), rank) for rank in ranks]
            heapify(self._heaps[ranks])
        heap = self._heaps[ranks]
        # Loads only grow, so an entry that is out of date is too low: it comes to the top, and is mended there.
        while heap[0][0] != (load := self._sent.get(heap[0][1], 0)):
            heapreplace(heap, (load, heap[0][1]))
        rank = heap[0][1]
        self._sent[rank] = load + elements
        return rank
