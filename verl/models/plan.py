"""Which packed tokens attend to which: a pure plan, made once for a packed input and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_SQUARE_COST = 2.0
"""A shared block is attended as one square while that costs at most this many times its parts apart."""
_FILL = 0.8
"""Units share a bucket when the shorter is at least this share of the longest, or at most 8 tokens shorter."""


@dataclass(frozen=True)
class Block:
    """Consecutive packed tokens: a prompt, then branches that each follow the prompt and do not see each other.

    A plain sequence is a prompt without branches.
    """

    start: int
    prompt: int
    branches: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.prompt + sum(self.branches)


@dataclass(frozen=True)
class Bucket:
    """G attention problems of similar length, padded on the right. Tensors are int64.

    query [G, Lq], key [G, Lk]: packed indices, 0 in padding.
    query_pos, key_pos: positions in the sequence, 0 in padding.
    query_branch, key_branch: 0 for the prompt, which all see; 1.. for a branch; -1 for padded keys, which none sees.
    causal: queries are the keys, and order alone decides who sees whom.
    """

    query: Tensor
    key: Tensor
    query_pos: Tensor
    key_pos: Tensor
    query_branch: Tensor
    key_branch: Tensor
    causal: bool

    def allowed(self, window: int | None) -> Tensor | None:
        """[G, Lq, Lk] bool, which key a query sees; None where plain causal order is exact."""
        if self.causal and (window is None or window >= self.query.shape[1]):
            return None
        ahead = self.query_pos[:, :, None] - self.key_pos[:, None, :]
        branch = self.key_branch[:, None, :]
        seen = (ahead >= 0) & ((branch == 0) | (branch == self.query_branch[:, :, None]))
        return seen if window is None else seen & (ahead < window)


@dataclass(frozen=True)
class Plan:
    """buckets: all attention problems. place [P]: where a token's output lies among the flat queries of the buckets."""

    buckets: tuple[Bucket, ...]
    place: Tensor

    @staticmethod
    def of(blocks: Sequence[Block], device: torch.device | str = "cpu") -> Plan:
        """Plan for blocks that cover the packed tokens 0, 1, ... without gap or overlap."""
        groups = _group([unit for block in blocks for unit in _units(block)])
        place = torch.empty(sum(b.length for b in blocks), dtype=torch.int64)
        offset = 0
        for group in groups:
            width = max(len(u.query) for u in group)
            for unit in group:
                place[unit.query] = torch.arange(offset, offset + len(unit.query))
                offset += width
        return Plan(tuple(_bucket(group, device) for group in groups), place.to(device))

    @staticmethod
    def sequences(lengths: Sequence[int], device: torch.device | str = "cpu") -> Plan:
        """Plan for plain sequences that lie one after the other."""
        starts = list(accumulate(lengths, initial=0))
        return Plan.of([Block(start, length) for start, length in zip(starts, lengths, strict=False)], device)


@dataclass(frozen=True)
class _Unit:
    """One attention problem: packed indices, positions and branches of its queries and keys."""

    query: Tensor
    key: Tensor
    query_pos: Tensor
    key_pos: Tensor
    query_branch: Tensor
    key_branch: Tensor
    causal: bool


def _units(block: Block) -> list[_Unit]:
    """A block as one square over the tree, or (where branches are long) the prompt and each branch apart."""
    index = torch.arange(block.start, block.start + block.length)
    sizes = torch.tensor([block.prompt, *block.branches])
    branch = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    first = torch.tensor([0] + [block.prompt] * len(block.branches))
    begin = sizes.cumsum(0) - sizes
    pos = torch.arange(block.length) - torch.repeat_interleave(begin - first, sizes)
    apart = block.prompt**2 + sum(n * (block.prompt + n) for n in block.branches)
    if not block.branches or block.length**2 <= _SQUARE_COST * apart:
        return [_Unit(index, index, pos, pos, branch, branch, not block.branches)]
    units = []
    for number in range(len(sizes)):
        mine = branch == number
        path = mine | (branch == 0)
        units.append(_Unit(index[mine], index[path], pos[mine], pos[path], branch[mine], branch[path], number == 0))
    return [u for u in units if len(u.query)]


def _group(units: list[_Unit]) -> list[list[_Unit]]:
    """Units of one kind and of similar length, longest first."""
    groups: list[list[_Unit]] = []
    for unit in sorted(units, key=lambda u: (u.causal, len(u.key), len(u.query)), reverse=True):
        top = groups[-1][0] if groups else None
        if (
            top is not None
            and top.causal == unit.causal
            and _close(top.key, unit.key)
            and _close(top.query, unit.query)
        ):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def _close(a: Tensor, b: Tensor) -> bool:
    short, long = sorted((len(a), len(b)))
    return short >= _FILL * long or long - short <= 8


def _bucket(group: list[_Unit], device: torch.device | str) -> Bucket:
    def pad(tensors: list[Tensor], fill: int = 0) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill).to(device)

    return Bucket(
        query=pad([u.query for u in group]),
        key=pad([u.key for u in group]),
        query_pos=pad([u.query_pos for u in group]),
        key_pos=pad([u.key_pos for u in group]),
        query_branch=pad([u.query_branch for u in group]),
        key_branch=pad([u.key_branch for u in group], fill=-1),
        causal=group[0].causal,
    )
