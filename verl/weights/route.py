"""One rank's part of a plan: what it keeps, and rounds of messages of a bounded size. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from verl.core.errors import WeightsError
from verl.weights.boxes import Box, extents, numel, pieces
from verl.weights.plan import Shard, Transfer

MIB = 1 << 20
BUCKET_BYTES = 16 * MIB


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, at most a bucket."""

    name: str
    box: Box


@dataclass(frozen=True)
class Message:
    """Pieces that travel as one contiguous buffer, in this order. peer: the other rank. nbytes: of the buffer."""

    peer: int
    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True)
class Round:
    """Messages that are under way together: at most one a peer and direction, together a bucket a direction."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class Route:
    """What `rank` does in a plan. holds, wants: its box of each name before and after; kept: boxes that are in both.

    Tensors travel as they are: dtypes has every name of the plan, also those that this rank never sees, as all ranks
    must agree on the rounds.
    """

    rank: int
    dtypes: Mapping[str, torch.dtype]
    holds: Mapping[str, Box]
    wants: Mapping[str, Box]
    kept: Mapping[str, Box]
    rounds: tuple[Round, ...]

    @classmethod
    def of(
        cls,
        rank: int,
        transfers: Sequence[Transfer],
        src: Iterable[Shard],
        dst: Iterable[Shard],
        dtypes: Mapping[str, torch.dtype],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Route:
        """transfers: `plan(src, dst)`. bucket_bytes: sent and received by any rank in a round, at most, each."""
        if bucket_bytes < 8:
            raise WeightsError(f"bucket of {bucket_bytes} bytes: one element may take 8")
        if unknown := {t.name for t in transfers} - set(dtypes):
            raise WeightsError(f"{min(unknown)}: no dtype is given for it")
        return cls(
            rank,
            dtypes,
            {shard.name: shard.box for shard in src if shard.rank == rank},
            {shard.name: shard.box for shard in dst if shard.rank == rank},
            {t.name: t.box for t in transfers if t.src == t.dst == rank},
            _rounds(rank, transfers, {name: dtype.itemsize for name, dtype in dtypes.items()}, bucket_bytes),
        )

    def nbytes(self, name: str, box: Box) -> int:
        return numel(box) * self.dtypes[name].itemsize

    def check(self, have: Mapping[str, torch.Tensor]) -> None:
        """WeightsError unless `have` holds what the route says that this rank holds."""
        for name, box in self.holds.items():
            if name not in have:
                raise WeightsError(f"{name}: rank {self.rank} should hold {extents(box)} of it, but has none")
            shape, dtype = tuple(have[name].shape), have[name].dtype
            if (shape, dtype) != (extents(box), self.dtypes[name]):
                raise WeightsError(
                    f"{name}: rank {self.rank} has {shape} in {dtype}; the layout says {extents(box)} in "
                    f"{self.dtypes[name]}"
                )


def _rounds(rank: int, transfers: Sequence[Transfer], itemsize: Mapping[str, int], bucket: int) -> tuple[Round, ...]:
    """The rounds of all ranks, of which those of `rank` are kept. Round k of one rank is round k of all others, and no
    rank waits in a round for what another does in a later one, so no order of ranks can block.
    """
    incoming, outgoing = defaultdict[int, _Fill](_Fill), defaultdict[int, _Fill](_Fill)
    out: dict[int, dict[tuple[int, int], list[Piece]]] = {}
    for transfer in _in_turn(transfers):
        size = itemsize[transfer.name]
        to, by = incoming[transfer.dst], outgoing[transfer.src]
        for box in pieces(transfer.box, bucket // size):
            nbytes = numel(box) * size
            number = max(to.next(nbytes, bucket), by.next(nbytes, bucket))
            to.put(number, nbytes)
            by.put(number, nbytes)
            if rank in (transfer.src, transfer.dst):
                pair = out.setdefault(number, {}).setdefault((transfer.src, transfer.dst), [])
                pair.append(Piece(transfer.name, box))
    return tuple(_round(rank, out[number], itemsize) for number in sorted(out))


def _in_turn(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Transfers between ranks, in an order that has all senders at work: the first parameter of every pipeline stage,
    then the second of each, and so on. Rank by rank, each would wait for the one before it.
    """
    moved = [t for t in transfers if t.src != t.dst]
    lowest: dict[str, int] = {}
    for t in moved:
        lowest[t.name] = min(t.src, lowest.get(t.name, t.src))
    counts, turn = defaultdict[int, int](int), dict[str, int]()
    for name, src in lowest.items():
        turn[name] = counts[src]
        counts[src] += 1
    return sorted(moved, key=lambda t: turn[t.name])


class _Fill:
    """How far one rank is in one direction: its last round, and the bytes in it."""

    __slots__ = ("nbytes", "number")

    def __init__(self) -> None:
        self.number, self.nbytes = 0, 0

    def next(self, nbytes: int, bucket: int) -> int:
        return self.number if self.nbytes + nbytes <= bucket else self.number + 1

    def put(self, number: int, nbytes: int) -> None:
        self.nbytes = nbytes if number > self.number else self.nbytes + nbytes
        self.number = number


def _round(rank: int, pairs: Mapping[tuple[int, int], list[Piece]], itemsize: Mapping[str, int]) -> Round:
    sends: list[Message] = []
    receives: list[Message] = []
    for (src, dst), parts in sorted(pairs.items()):
        # Wide elements first, so that each piece begins at a multiple of its own element size.
        parts = sorted(parts, key=lambda part: -itemsize[part.name])
        nbytes = sum(numel(part.box) * itemsize[part.name] for part in parts)
        (sends if src == rank else receives).append(Message(dst if src == rank else src, tuple(parts), nbytes))
    return Round(tuple(sends), tuple(receives))
