"""The two ways the decoder attends in generation: a packed prefill that fills slots, and one token for every slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verl.engines.rollout.cache import SlotCache
from verl.engines.rollout.prefill import Write
from verl.models.attention import Attend


class PrefillAttention:
    """Attention over packed prompts that also writes their keys and values into the cache."""

    def __init__(self, inner: Attend, cache: SlotCache, writes: Sequence[Write]):
        self._inner, self._cache, self._writes = inner, cache, writes

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [P, H, hd], k and v [P, KV, hd] to [P, H, hd]."""
        for new, layers in ((k, self._cache.keys), (v, self._cache.values)):
            for w in self._writes:
                layers[layer][w.slots, :, w.at : w.at + w.stop - w.start] = new[w.start : w.stop].transpose(0, 1)
        return self._inner(layer, q, k, v)


class DecodeAttention:
    """One new token for each of the first B slots, at `positions`. It reads views of the cache, no copies.

    Query heads that share a key head are the query rows of one attention, so grouped heads are never repeated.
    """

    def __init__(self, cache: SlotCache, positions_B: Tensor, longest: int, window: Callable[[int], int | None]):
        self._cache, self.positions, self._longest, self._window = cache, positions_B, longest, window
        self._rows = torch.arange(len(positions_B), device=positions_B.device)
        self._masks: dict[int | None, Tensor | None] = {}

    def cache_of(self, layer: int) -> tuple[Tensor, Tensor, int | None]:
        """(keys, values, window) of a layer, for a kernel that does the rest itself."""
        return self._cache.keys[layer], self._cache.values[layer], self._window(layer)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, hd], k and v [B, KV, hd] to [B, H, hd]."""
        rows, kv_heads, dim = k.shape
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self.positions] = k
        values[self._rows, :, self.positions] = v
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
            age = self.positions[:, None] - torch.arange(self._longest, device=self.positions.device)
            hidden = (age < 0) if window is None else (age < 0) | (age >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None] if bool(hidden.any()) else None
        return self._masks[window]
