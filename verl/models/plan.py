"""Which packed tokens attend to which: a pure plan, made once for a packed input and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

_SQUARE_COST = 2.0
"""A shared block is attended as one square while that costs at most this many times its parts apart."""
_FILL = 0.8
"""Units share a bucket when the shorter is at least this share of the longest, or at most 8 tokens shorter."""


@dataclass(frozen=True)
class Block:
    """Consecutive packed tokens: a prompt, then branches that do not see each other; a tree.

    Nodes are numbered in this order: 0 the prompt, 1.. the branches. follows[i]: the node that branch i continues;
    empty: all continue the prompt. What is below a node comes right after it, before anything else (preorder).
    A plain sequence is a prompt without branches.
    """

    start: int
    prompt: int
    branches: tuple[int, ...] = ()
    follows: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.prompt + sum(self.branches)


@dataclass(frozen=True)
class Bucket:
    """G attention problems of similar length, padded on the right. Tensors are int64.

    query [G, Lq], key [G, Lk]: packed indices, 0 in padding.
    query_pos, key_pos: positions in the sequence, 0 in padding.
    query_branch, key_branch: number of the node in its block; -1 for padded keys.
    key_end: the first number after the nodes at and below the key's, which are those that see it; 0 for padded keys.
    causal: queries are the keys, and order alone decides who sees whom.
    """

    query: Tensor
    key: Tensor
    query_pos: Tensor
    key_pos: Tensor
    query_branch: Tensor
    key_branch: Tensor
    key_end: Tensor
    causal: bool

    def allowed(self, window: int | None) -> Tensor | None:
        """[G, Lq, Lk] bool, which key a query sees; None where plain causal order is exact."""
        if self.causal and (window is None or window >= self.query.shape[1]):
            return None
        return _seen(self, window)


@dataclass(frozen=True)
class Unit:
    """One attention problem: packed indices, positions and nodes of its queries [Lq] and keys [Lk], as in `Bucket`."""

    query: Tensor
    key: Tensor
    query_pos: Tensor
    key_pos: Tensor
    query_branch: Tensor
    key_branch: Tensor
    key_end: Tensor
    causal: bool

    def allowed(self, window: int | None) -> Tensor | None:
        """[Lq, Lk] bool, which key a query sees; None where plain causal order is exact."""
        if self.causal and (window is None or window >= len(self.query)):
            return None
        return _seen(self, window)


def _seen(p: Bucket | Unit, window: int | None) -> Tensor:
    ahead = p.query_pos[..., :, None] - p.key_pos[..., None, :]
    node = p.query_branch[..., :, None]
    seen = (ahead >= 0) & (p.key_branch[..., None, :] <= node) & (node < p.key_end[..., None, :])
    return seen if window is None else seen & (ahead < window)


@dataclass(frozen=True)
class Plan:
    """units: all attention problems, on the host; every token is a query of one of them. device: of the model."""

    units: tuple[Unit, ...]
    device: torch.device | str = "cpu"

    @staticmethod
    def of(blocks: Sequence[Block], device: torch.device | str = "cpu") -> Plan:
        """Plan for blocks that cover the packed tokens 0, 1, ... without gap or overlap."""
        return Plan(tuple(unit for block in blocks for unit in _units(block)), device)

    @staticmethod
    def sequences(lengths: Sequence[int], device: torch.device | str = "cpu") -> Plan:
        """Plan for plain sequences that lie one after the other."""
        starts = list(accumulate(lengths, initial=0))
        return Plan.of([Block(start, length) for start, length in zip(starts, lengths, strict=False)], device)

    @cached_property
    def _groups(self) -> list[list[Unit]]:
        return _group(self.units)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The problems by similar length, on the device."""
        return tuple(_bucket(group, self.device) for group in self._groups)

    @cached_property
    def place(self) -> Tensor:
        """[P]: where a token's output lies among the flat queries of the buckets."""
        place = torch.empty(sum(len(u.query) for u in self.units), dtype=torch.int64)
        offset = 0
        for group in self._groups:
            width = max(len(u.query) for u in group)
            for unit in group:
                place[unit.query] = torch.arange(offset, offset + len(unit.query))
                offset += width
        return place.to(self.device)


def _units(block: Block) -> list[Unit]:
    """A tree cut into attention problems: a node with all below it as one square over its keys and those above, or
    (where that costs too much) the node alone and each tree below it apart."""
    tree = _Tree.of(block)
    index = torch.arange(block.length)
    sizes = torch.tensor(tree.sizes)
    node = torch.repeat_interleave(torch.arange(len(tree.sizes)), sizes)
    pos = index - torch.tensor([b - d for b, d in zip(tree.begin, tree.depth, strict=False)])[node]
    end = torch.tensor(tree.end)[node]
    whole = tree.squares()
    units, number = [], 0
    while number < len(tree.sizes):
        stop = tree.end[number] if whole[number] else number + 1
        mine = index[tree.begin[number] : tree.begin[stop]]
        keys = torch.cat([*(index[tree.begin[a] : tree.begin[a + 1]] for a in tree.above(number)), mine])
        causal = number == 0 and stop == 1
        unit = Unit(
            block.start + mine, block.start + keys, pos[mine], pos[keys], node[mine], node[keys], end[keys], causal
        )
        if len(mine):
            units.append(unit)
        number = stop
    return units


@dataclass(frozen=True)
class _Tree:
    """Per node: tokens, node above (-1: none), place of its first token in the block and position in the sequence, and
    the first node after those below it. begin has the number of all tokens as well."""

    sizes: list[int]
    parent: list[int]
    begin: list[int]
    depth: list[int]
    end: list[int]

    @staticmethod
    def of(block: Block) -> _Tree:
        sizes = [block.prompt, *block.branches]
        parent = [-1, *(block.follows or [0] * len(block.branches))]
        depth, end = [0] * len(sizes), list(range(1, len(sizes) + 1))
        for i in range(1, len(sizes)):
            depth[i] = depth[parent[i]] + sizes[parent[i]]
        for i in range(len(sizes) - 1, 0, -1):
            end[parent[i]] = max(end[parent[i]], end[i])
        return _Tree(sizes, parent, list(accumulate(sizes, initial=0)), depth, end)

    def above(self, number: int) -> list[int]:
        """Nodes above one, from the root down."""
        path = []
        while (number := self.parent[number]) >= 0:
            path.append(number)
        return path[::-1]

    def squares(self) -> list[bool]:
        """Per node: whether it and all below it are attended as one square."""
        apart = [n * (d + n) for n, d in zip(self.sizes, self.depth, strict=True)]
        whole = [True] * len(self.sizes)
        for i in range(len(self.sizes) - 1, -1, -1):
            tokens = self.begin[self.end[i]] - self.begin[i]
            square = tokens * (self.depth[i] + tokens)
            whole[i] = square <= _SQUARE_COST * apart[i]
            if self.parent[i] >= 0:
                apart[self.parent[i]] += min(square, apart[i])
        return whole


def _group(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units of one kind and of similar length, longest first."""
    groups: list[list[Unit]] = []
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


def _bucket(group: list[Unit], device: torch.device | str) -> Bucket:
    def pad(tensors: list[Tensor], fill: int = 0) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill).to(device)

    return Bucket(
        query=pad([u.query for u in group]),
        key=pad([u.key for u in group]),
        query_pos=pad([u.query_pos for u in group]),
        key_pos=pad([u.key_pos for u in group]),
        query_branch=pad([u.query_branch for u in group]),
        key_branch=pad([u.key_branch for u in group], fill=-1),
        key_end=pad([u.key_end for u in group]),
        causal=group[0].causal,
    )
