"""Attention as the decoder calls it, and the form of it that trains on packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verl.models.fused import FusedAttention
from verl.models.kernels import Kernels
from verl.models.plan import Bucket, Plan
from verl.models.ragged import Ragged

_SHORT = 192


class Attend(Protocol):
    """How one layer mixes tokens. The decoder gives rotated queries and keys; caching, packing and masks live here."""

    def __call__(self, layer: int, q_PHd: Tensor, k_PKd: Tensor, v_PKd: Tensor, /) -> Tensor:
        """q [P, H, hd], k and v [P, KV, hd] -> [P, H, hd]; query head h reads key head h // (H / KV)."""
        ...


class PackedAttention:
    """Causal attention within the blocks of a plan; `window(layer)` as in `DecoderConfig`.

    On a GPU no fused kernel takes both a mask and grouped heads: torch would make the [G, H, Lq, Lk] scores. So keys of
    masked problems are repeated there. With `kernels` (a CPU in bf16) nothing is padded, copied or cast.
    """

    def __init__(self, plan: Plan, window: Callable[[int], int | None], kernels: Kernels | None = None):
        self.plan = plan
        self.window = window
        self.kernels = kernels
        self._masks: dict[int | None, list[Tensor | None]] = {}
        self._problems: dict[int | None, Ragged] = {}

    def __call__(self, layer: int, q_PHd: Tensor, k_PKd: Tensor, v_PKd: Tensor) -> Tensor:
        heads, dim = q_PHd.shape[1:]
        fits = takes_heads(dim) and heads % k_PKd.shape[1] == 0
        if self.kernels is not None and fits and self.kernels.takes(q_PHd, k_PKd, v_PKd):
            return FusedAttention.apply(q_PHd, k_PKd, v_PKd, self._problems_of(self.window(layer)), self.kernels)
        inputs = {q_PHd.dtype: (q_PHd, k_PKd, v_PKd)}
        outs = []
        for bucket, mask in zip(self.plan.buckets, self._masks_of(self.window(layer)), strict=True):
            kind = _kind(q_PHd, bucket)
            if kind not in inputs:  # before the tokens are taken, so that gradients of a shared one add up in fp32
                inputs[kind] = (q_PHd.to(kind), k_PKd.to(kind), v_PKd.to(kind))
            index = (bucket.query, bucket.key, bucket.key)
            q, k, v = (_take(x, i) for x, i in zip(inputs[kind], index, strict=True))
            if mask is not None and q.device.type == "cuda":
                k, v = (_repeat(x, heads // x.shape[1]) for x in (k, v))
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            outs.append(out.transpose(1, 2).reshape(-1, heads * dim).to(q_PHd.dtype))
        return torch.cat(outs).index_select(0, self.plan.place).view(-1, heads, dim)

    def _problems_of(self, window: int | None) -> Ragged:
        """Made once for all layers of one window."""
        if window not in self._problems:
            self._problems[window] = Ragged.of(self.plan.units, window)
        return self._problems[window]

    def _masks_of(self, window: int | None) -> list[Tensor | None]:
        """Per bucket: [G, 1, Lq, Lk] or None; made once for all layers of one window."""
        if window not in self._masks:
            allowed = [bucket.allowed(window) for bucket in self.plan.buckets]
            self._masks[window] = [a if a is None else a.unsqueeze(1) for a in allowed]
        return self._masks[window]


def takes_heads(dim: int) -> bool:
    """Whether the kernels attend with heads of this size."""
    return dim % 16 == 0


def _kind(q: Tensor, bucket: Bucket) -> torch.dtype:
    """Short problems on a CPU run in fp32: there the bf16 backward takes three times as long."""
    short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and bucket.key.shape[1] <= _SHORT
    return torch.float32 if short else q.dtype


def _repeat(x_GKLd: Tensor, times: int) -> Tensor:
    """[G, K, L, d] with each head `times` times in a row; the gradient of a head is a plain sum."""
    return x_GKLd[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def _take(x_Phd: Tensor, index_GL: Tensor) -> Tensor:
    """Rows of [P, h, d] as [G, h, L, d]."""
    heads, dim = x_Phd.shape[1:]
    rows = x_Phd.reshape(-1, heads * dim).index_select(0, index_GL.reshape(-1))
    return rows.view(*index_GL.shape, heads, dim).transpose(1, 2)
