"""Attention problems without padding, as the compiled kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from verl.models.plan import Unit


@dataclass(frozen=True)
class Ragged:
    """U problems on the CPU. query, key: packed indices of all of them; query_at, key_at [U + 1]: where each begins.

    seen: per problem [queries, keys] bool, or None where the queries are the keys and order and window decide; seen_at
    [U]: where they lie in memory, or 0. disjoint: whether each token is a key in one problem only. All int64.
    """

    query: Tensor
    key: Tensor
    query_at: Tensor
    key_at: Tensor
    seen: tuple[Tensor | None, ...]
    seen_at: Tensor
    disjoint: bool
    window: int | None

    @staticmethod
    def of(units: Sequence[Unit], window: int | None) -> Ragged:
        """window: as in `DecoderConfig`. Long problems come first, so that no thread is left with one at the end."""
        units = sorted(units, key=lambda u: len(u.query) * len(u.key), reverse=True)
        masks = (None if u.causal else u.allowed(window) for u in units)
        seen = tuple(None if mask is None else mask.contiguous() for mask in masks)
        query, key = (torch.cat(parts) for parts in ([u.query for u in units], [u.key for u in units]))
        return Ragged(
            query,
            key,
            _starts(u.query for u in units),
            _starts(u.key for u in units),
            seen,
            torch.tensor([0 if mask is None else mask.data_ptr() for mask in seen]),
            disjoint=len(key) == len(query),  # a token is a query once, and sees itself
            window=window,
        )


def _starts(parts: Iterable[Tensor]) -> Tensor:
    return torch.tensor(list(accumulate(map(len, parts), initial=0)))
