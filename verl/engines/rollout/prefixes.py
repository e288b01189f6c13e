"""Which beginnings of finished sequences are kept, and in which places of a store. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

Tokens = tuple[int, ...]
BLOCK = 8
"""Tokens of a block. What is in common beyond the last whole block is computed again, 3.5 tokens on average."""
_ROOT = -1


class Prefixes:
    """Blocks of BLOCK tokens in `capacity` places, each known by the block before it and its own tokens.

    So what sequences begin with in common is kept once, and a look-up takes one step a block. Where there is no place
    left, the block goes that was used longest ago. A block is used whenever one behind it is, so the one that goes has
    none behind it.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._places: OrderedDict[tuple[int, Tokens], int] = OrderedDict()
        """(place of the block before, tokens) to place; the one used longest ago first."""

    def __len__(self) -> int:
        return len(self._places)

    def find(self, tokens: Tokens) -> list[int]:
        """Places of the longest kept beginning, in whole blocks; they count as used."""
        keys = []
        before = _ROOT
        for block in _blocks(tokens):
            key = (before, block)
            if key not in self._places:
                break
            keys.append(key)
            before = self._places[key]
        self._use(keys)
        return [self._places[key] for key in keys]

    def add(self, tokens: Tokens) -> tuple[int, list[int]]:
        """(first, places): block number first + i of the tokens is new and belongs in places[i].

        Of tokens that have more blocks than there are places, the first ones are kept.
        """
        known = self.find(tokens)
        before = known[-1] if known else _ROOT
        keys: list[tuple[int, Tokens]] = []
        for block in islice(_blocks(tokens), len(known), self.capacity):
            keys.append((before, block))
            before = self._place()
            self._places[keys[-1]] = before
        places = [self._places[key] for key in keys]
        self._use(keys)
        # Those before them are used last of all; they were found just now, so a second look finds the same.
        self.find(tokens[: len(known) * BLOCK])
        return len(known), places

    def clear(self) -> None:
        """Forget everything."""
        self._places.clear()

    def _place(self) -> int:
        """A place that is free, or the one used longest ago, which then is."""
        if len(self._places) < self.capacity:
            return len(self._places)
        return self._places.popitem(last=False)[1]

    def _use(self, keys: Sequence[tuple[int, Tokens]]) -> None:
        """These, each behind the one before, are used now. The last goes first, or its place could outlive its way."""
        for key in reversed(keys):
            self._places.move_to_end(key)


def _blocks(tokens: Tokens) -> Iterator[Tokens]:
    """The whole blocks of the tokens."""
    return (tokens[i : i + BLOCK] for i in range(0, len(tokens) - BLOCK + 1, BLOCK))
