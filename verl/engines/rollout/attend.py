"""The two ways the decoder attends in generation: a packed prefill that fills slots, and one token for every slot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verl.engines.rollout.cache import SlotCache
from verl.engines.rollout.kernels import Places
from verl.engines.rollout.prefill import Part, PrefillPlan
from verl.models.attention import PackedAttention

_LONG, _LONG_PLAIN = 256, 1024
"""Prompts from here on are attended as squares, not row by row: with the kernels of training, and without."""


class PrefillAttention:
    """Attention over packed prompts that also writes their keys and values into the cache. Its parts, behind the
    prompts, see the tokens that their slots hold."""

    def __init__(self, inner: PackedAttention, cache: SlotCache, plan: PrefillPlan):
        self._inner, self._cache, self._plan = inner, cache, plan
        self._prompts = plan.parts[0].start if plan.parts else len(plan.token_ids)
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [P, H, hd], k and v [P, KV, hd] to [P, H, hd]."""
        for new, layers in ((k, self._cache.keys), (v, self._cache.values)):
            for w in self._plan.writes:
                layers[layer][w.slots, :, w.at : w.at + w.stop - w.start] = new[w.start : w.stop].transpose(0, 1)
        n = self._prompts
        outs = [self._inner(layer, q[:n], k[:n], v[:n])] if n else []
        outs += [self._part(layer, part, q[part.start : part.stop]) for part in self._plan.parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    @property
    def places(self) -> Places | None:
        """Of all tokens, for a kernel that does the rest itself; None where its way is the slower one."""
        if max(self._plan.positions) >= (_LONG_PLAIN if self._inner.kernels is None else _LONG):
            return None
        slots = torch.empty(len(self._plan.token_ids), dtype=torch.int64)
        copies = torch.empty_like(slots)
        for w in self._plan.writes:
            slots[w.start : w.stop], copies[w.start : w.stop] = w.slots.start, w.slots.stop - w.slots.start
        return Places(slots, copies, torch.tensor(self._plan.positions))

    def cache_of(self, layer: int) -> tuple[Tensor, Tensor, int | None]:
        """(keys, values, window) of a layer."""
        return self._cache.keys[layer], self._cache.values[layer], self._inner.window(layer)

    def _part(self, layer: int, part: Part, q: Tensor) -> Tensor:
        seen = part.at + len(q)
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            self._cache.keys[layer][part.slot, None, :, :seen],
            self._cache.values[layer][part.slot, None, :, :seen],
            attn_mask=self._mask(part.at, seen, self._inner.window(layer)),
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _mask(self, at: int, seen: int, window: int | None) -> Tensor:
        """[seen - at, seen] bool, which key a query sees. One for all layers of a window."""
        key = (at, seen, window)
        if key not in self._masks:
            place = torch.arange(seen, device=self._cache.keys[0].device)
            age = place[at:, None] - place
            self._masks[key] = age >= 0 if window is None else (age >= 0) & (age < window)
        return self._masks[key]


class DecodeAttention:
    """One new token for each of the first B slots, at `positions`. It reads views of the cache, no copies.

    Query heads that share a key head are the query rows of one attention, so grouped heads are never repeated.
    """

    def __init__(self, cache: SlotCache, positions_B: Tensor, longest: int, window: Callable[[int], int | None]):
        self._cache, self._positions, self._longest, self._window = cache, positions_B, longest, window
        self._rows = torch.arange(len(positions_B), device=positions_B.device)
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def places(self) -> Places:
        """Of all rows, for a kernel that does the rest itself."""
        return Places(self._rows, torch.ones_like(self._rows), self._positions)

    def cache_of(self, layer: int) -> tuple[Tensor, Tensor, int | None]:
        """(keys, values, window) of a layer."""
        return self._cache.keys[layer], self._cache.values[layer], self._window(layer)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, hd], k and v [B, KV, hd] to [B, H, hd]."""
        rows, kv_heads, dim = k.shape
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = k
        values[self._rows, :, self._positions] = v
        out = scaled_dot_product_attention(
            q.view(rows, kv_heads, -1, dim),
            keys[:rows, :, : self._longest],
            values[:rows, :, : self._longest],
            attn_mask=self._mask(self._window(layer), q.dtype),
        )
        return out.reshape(q.shape)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, 1, longest], 0 where a key is seen and -inf elsewhere; None where all see all. One for each window."""
        if window not in self._masks:
            age = self._positions[:, None] - torch.arange(self._longest, device=self._positions.device)
            hidden = (age < 0) if window is None else (age < 0) | (age >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None] if bool(hidden.any()) else None
        return self._masks[window]
