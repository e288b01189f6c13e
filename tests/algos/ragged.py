"""Ragged random batches for property tests: float64, any mask, with rows that have no counted token."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from verl.algos.segments import Segments


@dataclass
class Ragged:
    lengths: list[int]
    mask: np.ndarray
    group: np.ndarray
    rng: np.random.Generator

    @property
    def segments(self) -> Segments:
        cu = torch.tensor([0, *np.cumsum(self.lengths)])
        return Segments.of(cu, torch.from_numpy(self.mask))

    def column(self, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=len(self.mask)) * scale)

    def rows(self, *columns: torch.Tensor) -> list[tuple[list[float], ...]]:
        """(columns..., mask) of each sequence."""
        cuts = np.cumsum(self.lengths)[:-1]
        parts = [np.split(np.asarray(c), cuts) for c in (*columns, self.mask)]
        return [tuple(p.tolist() for p in row) for row in zip(*parts, strict=True)]

    def poisoned(self, column: torch.Tensor, value: float) -> torch.Tensor:
        return torch.where(torch.from_numpy(self.mask), column, torch.tensor(value, dtype=column.dtype))


@st.composite
def ragged(draw: st.DrawFn, max_seqs: int = 6, max_len: int = 7) -> Ragged:
    lengths = draw(st.lists(st.integers(1, max_len), min_size=1, max_size=max_seqs))
    mask = np.array(draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))))
    group = np.array(draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))))
    return Ragged(lengths, mask, group, np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
