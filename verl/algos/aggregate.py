"""From token losses to one number: the only place that divides, by counts of the whole optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algos.segments import Segments
from verl.core.errors import ConfigError
from verl.core.registry import suggestion

MODES = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


@dataclass(frozen=True)
class Denominators:
    """Counts over a whole optimizer mini-batch and all ranks: counted tokens, sequences with at least one of them."""

    tokens: float
    seqs: float

    @classmethod
    def of(cls, segments: Segments) -> Denominators:
        return cls(float(segments.mask.sum()), float((segments.counts > 0).sum()))


@dataclass(frozen=True)
class Aggregation:
    """mode: one of MODES; length: the fixed divisor of seq_mean_token_sum_norm (arXiv:2503.20783)."""

    mode: str
    length: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            hint = suggestion(self.mode, list(MODES))
            raise ConfigError(f"algorithm.aggregation: unknown mode {self.mode!r}{hint}; known: {', '.join(MODES)}")
        if self.mode == "seq_mean_token_sum_norm" and self.length is None:
            raise ConfigError(
                "algorithm.aggregation_length: needed by seq_mean_token_sum_norm; give a number of tokens"
            )

    def weights(self, segments: Segments, total: Denominators, dtype: torch.dtype = torch.float32) -> Tensor:
        """[T] weight of each token in the scalar loss. Summed over all parts of a mini-batch they are its mean."""
        one = segments.mask.to(dtype)
        seqs, tokens = max(total.seqs, 1.0), max(total.tokens, 1.0)
        if self.mode == "token_mean":
            return one / tokens
        if self.mode == "token_sum":
            return one
        if self.mode == "seq_mean_token_mean":
            return one / segments.counts.clamp(min=1)[segments.seq] / seqs
        if self.mode == "seq_mean_token_sum":
            return one / seqs
        assert self.length is not None
        return one / seqs / self.length

    def __call__(self, loss: Tensor, segments: Segments, total: Denominators) -> Tensor:
        """The scalar that backward starts from: this part's share of the mini-batch's loss."""
        return (segments.zero(loss) * self.weights(segments, total, loss.dtype)).sum()
