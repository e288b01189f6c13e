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
        return self._use(self._known(tokens))

    def add(self, tokens: Tokens) -> tuple[int, list[int]]:
        """(first, places): block number first + i of the tokens is new and belongs in places[i].

        Of tokens that have more blocks than there are places, the first ones are kept.
        """
        keys = self._known(tokens)
        first, before = len(keys), (self._use(keys) or [_ROOT])[-1]
        for block in islice(_blocks(tokens), first, self.capacity):
            keys.append((before, block))
            before = self._places[keys[-1]] = self._place()
        return first, self._use(keys)[first:]

    def clear(self) -> None:
        """Forget everything."""
        self._places.clear()

    def _place(self) -> int:
        """A place that is free, or the one used longest ago, which then is."""
        if len(self._places) < self.capacity:
            return len(self._places)
        return self._places.popitem(last=False)[1]

    def _known(self, tokens: Tokens) -> list[tuple[int, Tokens]]:
        """Keys of the longest kept beginning."""
        keys = []
        before = _ROOT
        for block in _blocks(tokens):
            if (before, block) not in self._places:
                break
            keys.append((before, block))
            before = self._places[keys[-1]]
        return keys

    def _use(self, keys: Sequence[tuple[int, Tokens]]) -> list[int]:
        """Places of these keys, each behind the one before. They are used now; the last one will be the first to go."""
        for key in reversed(keys):
            self._places.move_to_end(key)
        return [self._places[key] for key in keys]


def _blocks(tokens: Tokens) -> Iterator[Tokens]:
    """The whole blocks of the tokens."""
    return (tokens[i : i + BLOCK] for i in range(0, len(tokens) - BLOCK + 1, BLOCK))
