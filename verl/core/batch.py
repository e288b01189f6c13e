"""The one data format: flat, unpadded sequences with `cu_seqlens` and named columns.

Legend: N sequences, T tokens. Alignment, the only rule: the value at position t describes token t (its log-prob given
the tokens before it, the value of the state before it). Position 0 of a sequence never trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl.core.columns import SCHEMA
from verl.core.trajectory import Trajectory


@dataclass(frozen=True)
class Batch:
    """cu_seqlens [N+1] int64, starting at 0, always on the host; cols: name to tensor, [T] for token columns and [N]
    for sequence columns.
    """

    cu_seqlens: Tensor
    cols: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name, col in self.cols.items():
            if name not in SCHEMA:
                raise KeyError(f"{name!r} is not in the column catalogue (verl/core/columns.py)")
            spec = SCHEMA[name]
            want = self.num_tokens if spec.level == "token" else self.num_seqs
            if col.ndim != 1 + spec.wide or len(col) != want:
                shape = f"({want}, K)" if spec.wide else f"({want},)"
                raise ValueError(f"column {name!r}: shape {tuple(col.shape)}, expected {shape} ({spec.level} level)")
            if col.dtype != getattr(torch, spec.dtype):
                raise TypeError(f"column {name!r}: dtype {col.dtype}, expected {spec.dtype}")

    @property
    def num_seqs(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """[N] tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def seq_of_token(self) -> Tensor:
        """[T] number of the sequence that a token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_seqs), self.lengths)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.cols:
            raise KeyError(f"batch has no column {name!r}; it has {sorted(self.cols)}")
        return self.cols[name]

    def __contains__(self, name: str) -> bool:
        return name in self.cols

    def with_(self, **cols: Tensor) -> Batch:
        """The same sequences with columns added or replaced."""
        return replace(self, cols={**self.cols, **cols})

    def select(self, names: Iterable[str]) -> Batch:
        """The same sequences with only these columns."""
        return replace(self, cols={name: self[name] for name in names})

    def merge(self, *others: Batch) -> Batch:
        """Columns of others over the same sequences, joined to ours."""
        cols = dict(self.cols)
        for other in others:
            if not torch.equal(other.cu_seqlens, self.cu_seqlens):
                raise ValueError("merge of batches over different sequences")
            cols.update(other.cols)
        return replace(self, cols=cols)

    def take(self, index: Sequence[int] | Tensor) -> Batch:
        """Sequences `index`, in that order (repeats allowed)."""
        idx = torch.as_tensor(index, dtype=torch.int64)
        spans = [torch.arange(int(self.cu_seqlens[i]), int(self.cu_seqlens[i + 1])) for i in idx.tolist()]
        tokens = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
        cu = cumulative(self.lengths[idx])
        return Batch(cu, {k: v[tokens if SCHEMA[k].level == "token" else idx] for k, v in self.cols.items()})

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """All sequences of parts, in order. Parts must have the same columns."""
        names = set(parts[0].cols)
        if any(set(p.cols) != names for p in parts):
            raise ValueError(f"concat of batches with different columns: {[sorted(p.cols) for p in parts]}")
        cu = cumulative(torch.cat([p.lengths for p in parts]))
        return Batch(cu, {k: torch.cat([p[k] for p in parts]) for k in parts[0].cols})

    def to(self, device: torch.device | str) -> Batch:
        """The same columns on a device. cu_seqlens stays on the host, where lengths are read without waiting."""
        return Batch(self.cu_seqlens, {k: v.to(device) for k, v in self.cols.items()})

    def per_seq(self, token_col: Tensor) -> list[Tensor]:
        """A [T] tensor as N views, one a sequence."""
        return list(torch.split(token_col, self.lengths.tolist()))

    def padded(self, name: str, fill: float = 0.0) -> Tensor:
        """A token column as [N, longest], right-padded with `fill`; a view for people, never used inside."""
        return torch.nn.utils.rnn.pad_sequence(self.per_seq(self[name]), batch_first=True, padding_value=fill)

    @staticmethod
    def of(trajectories: Sequence[Trajectory]) -> Batch:
        """Pack sampled trajectories; rewards are joined later, keyed by position."""
        lengths = torch.tensor([len(t.token_ids) for t in trajectories], dtype=torch.int64)

        def flat(field: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([x for t in trajectories for x in getattr(t, field)], dtype=dtype)

        return Batch(
            cumulative(lengths),
            {
                "token_ids": flat("token_ids", torch.int64),
                "loss_mask": flat("loss_mask", torch.bool),
                "rollout_logprobs": flat("logprobs", torch.float32),
                "group_id": torch.tensor([t.group_id for t in trajectories], dtype=torch.int64),
                "version": torch.tensor([t.versions[0] if t.versions else 0 for t in trajectories], dtype=torch.int64),
                "excluded": torch.tensor([t.finish == "abort" for t in trajectories], dtype=torch.bool),
                "truncated": torch.tensor([t.finish != "stop" for t in trajectories], dtype=torch.bool),
            },
        )


def cumulative(lengths: Tensor) -> Tensor:
    """[N] lengths to [N+1] offsets starting at 0."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.to(torch.int64).cumsum(0)])
