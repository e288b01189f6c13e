"""Keys and values of the running sequences, one slot each, the running ones always in front."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.engines.rollout.admission import Budget

_STEP = 64
"""Slots grow by this many tokens at least, so that growth is rare."""


@dataclass(frozen=True)
class Prefix:
    """Keys and values [layers] of [KV, P, hd] of one prompt, and the features [F] of its last token."""

    tokens: tuple[int, ...]
    keys: list[Tensor]
    values: list[Tensor]
    features: Tensor


class SlotCache:
    """Per layer, keys and values [slots, KV, tokens, hd]. Nothing is allocated before the first `reserve`.

    Layers are separate tensors, so that growing needs room for one layer more, never for a second cache. Memory is
    reused from call to call and given back by `release`.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        budget: Budget,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._shape = (num_kv_heads, head_dim)
        self._budget = budget
        self._dtype, self._device = dtype, device
        self.keys: list[Tensor] = [self._empty(0, 0) for _ in range(num_layers)]
        self.values: list[Tensor] = [self._empty(0, 0) for _ in range(num_layers)]

    def _empty(self, slots: int, tokens: int) -> Tensor:
        heads, dim = self._shape
        # Zeros, not garbage: a masked NaN would still poison a weighted sum. Untouched pages cost nothing on CPU.
        return torch.zeros(slots, heads, tokens, dim, dtype=self._dtype, device=self._device)

    @property
    def slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def tokens(self) -> int:
        """Tokens that a slot has room for."""
        return self.keys[0].shape[2]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def reserve(self, slots: int, tokens: int, longest: int, used_slots: int, used_tokens: int) -> None:
        """Room for `slots` x `tokens`, which the budget must allow, keeping the first used_slots x used_tokens.

        Both grow by half at least, so that growing is rare, though not beyond the budget, and not beyond `longest`,
        the most tokens that any sequence here may come to.
        """
        if slots <= self.slots and tokens <= self.tokens:
            return
        new_slots, new_tokens = self._grown(slots, tokens, longest)
        for layers in (self.keys, self.values):
            for i, old in enumerate(layers):
                layers[i] = self._empty(new_slots, new_tokens)
                layers[i][:used_slots, :, :used_tokens] = old[:used_slots, :, :used_tokens]

    def _grown(self, slots: int, tokens: int, longest: int) -> tuple[int, int]:
        new_slots, new_tokens = self.slots, self.tokens
        if slots > self.slots:
            new_slots = max(slots, min(self._budget.max_slots, self.slots * 3 // 2))
        if tokens > self.tokens:
            new_tokens = max(tokens, min(longest, max(self.tokens * 3 // 2, tokens + _STEP)))
            new_tokens += -new_tokens % _STEP
        if self._budget.fits(new_slots, new_tokens):
            return new_slots, new_tokens
        # No room for spare slots: these, as long as they can be.
        return slots, self._budget.tallest(slots, longest)

    def move(self, source: list[int], target: list[int], tokens: int) -> None:
        """Copy the first `tokens` tokens of the source slots over the target slots (disjoint lists)."""
        for layers in (self.keys, self.values):
            for layer in layers:
                for s, t in zip(source, target, strict=True):
                    layer[t, :, :tokens] = layer[s, :, :tokens]

    def spread(self, slots: slice, tokens: int) -> None:
        """Copy the first `tokens` tokens of the first of these slots over the others."""
        for layers in (self.keys, self.values):
            for layer in layers:
                layer[slots.start + 1 : slots.stop, :, :tokens] = layer[slots.start, :, :tokens]

    def prefix(self, slot: int, tokens: tuple[int, ...], features: Tensor) -> Prefix:
        """A copy of the first tokens of a slot, for sequences that will start from them later."""
        n = len(tokens)
        keys, values = ([layer[slot, :, :n].clone() for layer in layers] for layers in (self.keys, self.values))
        return Prefix(tokens, keys, values, features)

    def start_from(self, prefix: Prefix, slots: slice) -> None:
        """Write a prefix into these slots."""
        n = len(prefix.tokens)
        for layers, parts in ((self.keys, prefix.keys), (self.values, prefix.values)):
            for layer, part in zip(layers, parts, strict=True):
                layer[slots, :, :n] = part

    def release(self) -> None:
        """Give the memory back."""
        for layers in (self.keys, self.values):
            layers[:] = [self._empty(0, 0) for _ in layers]
