"""Masked tensors over flat sequences: the primitives that every estimator and loss is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which tokens count. seq [T] int64: sequence of a token; mask [T] bool: 1 where the policy drew it; num_seqs: N.

    Every reduction takes `where(mask, x, 0)` first, so a NaN at a masked position changes nothing.
    """

    seq: Tensor
    mask: Tensor
    num_seqs: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, mask: Tensor) -> Segments:
        lengths = cu_seqlens.diff()
        numbers = torch.arange(len(lengths), device=mask.device)
        # With its size known, a GPU is not waited for.
        seq = torch.repeat_interleave(numbers, lengths.to(mask.device), output_size=len(mask))
        return cls(seq, mask.bool(), len(lengths))

    def zero(self, x: Tensor) -> Tensor:
        """[T] with 0 where the mask is 0."""
        return torch.where(self.mask, x, torch.zeros((), dtype=x.dtype, device=x.device))

    @property
    def counts(self) -> Tensor:
        """[N] counted tokens of each sequence."""
        return self.sum_per_seq(torch.ones_like(self.seq))

    def sum_per_seq(self, x: Tensor) -> Tensor:
        """[T] -> [N] sum over counted tokens."""
        return torch.zeros(self.num_seqs, dtype=x.dtype, device=x.device).index_add(0, self.seq, self.zero(x))

    def mean_per_seq(self, x: Tensor) -> Tensor:
        """[T] -> [N] mean over counted tokens; 0 for a sequence without any."""
        return self.sum_per_seq(x) / self.counts.clamp(min=1).to(x.dtype)

    def spread(self, x_N: Tensor) -> Tensor:
        """[N] -> [T], 0 where the mask is 0."""
        return self.zero(x_N[self.seq])

    def mean(self, x: Tensor) -> Tensor:
        """Mean over all counted tokens; 0 where there are none."""
        return self.zero(x).sum() / self.mask.sum().clamp(min=1)

    def whiten(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(var + 1e-8) over counted tokens, var unbiased; with fewer than two, x - mean."""
        out, kept = torch.zeros_like(x), x[self.mask]
        if len(kept) == 0:
            return out
        # As distances from the largest: equal values of any size then give exactly 0, where the rounding of their mean,
        # divided by almost nothing, would give all of them an advantage.
        gap = kept - kept.amax()
        centred = gap - gap.mean()
        if len(kept) > 1:
            centred = centred / (centred.square().sum() / (len(kept) - 1) + 1e-8).sqrt()
        out[self.mask] = centred
        return out

    def last(self) -> Tensor:
        """[T] bool: the last counted token of each sequence."""
        return self.mask & (self.position() == self.end()[self.seq])

    def end(self) -> Tensor:
        """[N] int64: position of the last counted token, -1 for a sequence without any."""
        none = torch.full((self.num_seqs,), -1, device=self.seq.device)
        return none.scatter_reduce(0, self.seq, torch.where(self.mask, self.position(), -1), "amax")

    def position(self) -> Tensor:
        """[T] int64: place of a token in its sequence, 0 first; masked tokens have one too."""
        lengths = torch.bincount(self.seq, minlength=self.num_seqs)
        return torch.arange(len(self.seq), device=self.seq.device) - (lengths.cumsum(0) - lengths)[self.seq]

    def dense(self, x: Tensor) -> Tensor:
        """[T] -> [N, K] with the counted tokens of each sequence moved together to the left, 0 behind them."""
        counts = self.counts
        out = torch.zeros(self.num_seqs, int(counts.max()) if self.num_seqs else 0, dtype=x.dtype, device=x.device)
        seq, rank = self._places()
        out[seq, rank] = x[self.mask]
        return out

    def flat(self, dense: Tensor) -> Tensor:
        """[N, K] -> [T], the inverse of `dense`; 0 where the mask is 0."""
        out = torch.zeros(len(self.seq), dtype=dense.dtype, device=dense.device)
        out[self.mask] = dense[self._places()]
        return out

    def _places(self) -> tuple[Tensor, Tensor]:
        counts = self.counts
        starts = counts.cumsum(0) - counts
        seq = self.seq[self.mask]
        return seq, torch.arange(len(seq), device=seq.device) - starts[seq]
