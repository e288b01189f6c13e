"""Keys and values of finished sequences, for requests that begin with the same tokens: a second turn, above all."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.core import RolloutError
from verl.engines.rollout.cache import SlotCache
from verl.engines.rollout.memory import bytes_of
from verl.engines.rollout.prefixes import BLOCK, Prefixes, Tokens


class PrefixCache:
    """Copies from and to the slots. Its keys are those of the weights that computed them: clear it with each version.

    token_bytes: keys and values of one token, all layers. gb: 10^9 bytes that it may take, 0 for none; nothing is
    allocated before the first `keep`, which raises RolloutError where the device refuses the memory.
    """

    def __init__(self, slots: SlotCache, token_bytes: int, gb: float):
        self._slots, self._gb = slots, gb
        self._prefixes = Prefixes(bytes_of(gb) // (BLOCK * token_bytes))
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    def reusable(self, tokens: Tokens) -> int:
        """How many of the tokens `start` would copy now. Never all: the last one's features must be computed."""
        return BLOCK * len(self._prefixes.find(tokens[:-1]))

    def start(self, tokens: Tokens, slots: slice) -> int:
        """Copy what is kept of the tokens into each of these slots; how many tokens that is."""
        places = self._prefixes.find(tokens[:-1])
        if places:
            where = torch.tensor(places, device=self._keys[0].device)
            for kept, layers in ((self._keys, self._slots.keys), (self._values, self._slots.values)):
                for blocks, layer in zip(kept, layers, strict=True):
                    layer[slots, :, : BLOCK * len(places)] = blocks[where].transpose(0, 1).flatten(1, 2)
        return BLOCK * len(places)

    def keep(self, tokens: Tokens, slot: int) -> None:
        """Copy the keys of these tokens, the first in the slot, as far as they are not here yet."""
        first, places = self._prefixes.add(tokens)
        if not places:
            return
        if not self._keys:
            self._keys, self._values = self._allocated()
        where = torch.tensor(places, device=self._keys[0].device)
        new = slice(BLOCK * first, BLOCK * (first + len(places)))
        for kept, layers in ((self._keys, self._slots.keys), (self._values, self._slots.values)):
            for blocks, layer in zip(kept, layers, strict=True):
                blocks[where] = layer[slot, :, new].unflatten(1, (-1, BLOCK)).transpose(0, 1)

    def clear(self) -> None:
        """Forget everything; the memory stays for what comes."""
        self._prefixes.clear()

    def release(self) -> None:
        """Forget everything and give the memory back."""
        self.clear()
        self._keys, self._values = [], []

    def _allocated(self) -> tuple[list[Tensor], list[Tensor]]:
        try:
            return self._allocate(self._slots.keys), self._allocate(self._slots.values)
        except RuntimeError as e:  # what both torch's allocators raise; nothing but they runs here
            raise RolloutError(
                f"rollout.prefix_cache_gb: {self._gb} GB are more than the device gives now; lower it, or set 0"
            ) from e

    def _allocate(self, layers: list[Tensor]) -> list[Tensor]:
        """Per layer [blocks, KV, BLOCK, hd]. Untouched pages cost nothing on CPU."""
        return [t.new_empty(self._prefixes.capacity, t.shape[1], BLOCK, t.shape[3]) for t in layers]
