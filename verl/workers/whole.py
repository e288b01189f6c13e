"""A whole mini-batch on every rank, from the parts that data ranks have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from verl.core.batch import Batch, cumulative
from verl.parallel.mesh import Mesh
from verl.workers.update_plan import MiniBatch

_DATA = ("shard", "replicate")


class Whole:
    """mine: the sequences of `mini` that lie here, maybe none. Every data rank makes it and asks it, alike.

    Each value is put where it belongs and added to the zeros of other ranks, so it stays as it is.
    """

    def __init__(self, mine: Batch, mini: MiniBatch, mesh: Mesh):
        self.mesh = mesh
        lengths = torch.zeros(mini.count, dtype=torch.int64)
        lengths[list(mini.places)] = mine.lengths
        self.cu_seqlens = cumulative(self._sum(lengths))
        spans = [torch.arange(int(self.cu_seqlens[p]), int(self.cu_seqlens[p + 1])) for p in mini.places]
        self._here = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def batch(self, mine: Batch, names: Iterable[str]) -> Batch:
        """All sequences, in the order that one process has them, with these token columns."""
        return Batch(self.cu_seqlens, {name: self.column(mine[name]) for name in names})

    def column(self, mine: Tensor) -> Tensor:
        """[tokens of all], on the host, from the tokens here."""
        out = torch.zeros(int(self.cu_seqlens[-1]), dtype=torch.int64 if mine.dtype == torch.bool else mine.dtype)
        out[self._here] = mine.to(out.dtype)
        return self._sum(out).to(mine.dtype)

    def part(self, column: Tensor) -> Tensor:
        """Of a column of all, the tokens here."""
        return column[self._here]

    def _sum(self, values: Tensor) -> Tensor:
        return self.mesh.sum(values, *_DATA).cpu()
