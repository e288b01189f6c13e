"""Workers that tests start in other processes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl.controller.dispatch import ALL_TO_ALL, ONE_TO_ALL, RANK_ZERO, THREE_D
from verl.controller.partition import Parts, Splits
from verl.controller.rank import Rank
from verl.controller.worker import Worker, register
from verl.core.batch import Batch
from verl.core.metrics import Metrics


@dataclass(frozen=True)
class Weights(Splits):
    """A number for each sequence."""

    values: tuple[float, ...]

    def split(self, parts: Parts) -> list[Weights]:
        return [Weights(tuple(self.values[i] for i in part)) for part in parts]


class Probe(Worker):
    """Says what it was given."""

    def __init__(self, rank: Rank, number: float = 0.0):
        self.rank, self.number = rank, number
        self.weight = torch.full((4,), number)

    @register(THREE_D, reads=("token_ids", "group_id"), writes=("values",), optional=("loss_mask",))
    def score(self, batch: Batch) -> Batch:
        values = batch["token_ids"].float() * 2
        return Batch(
            batch.cu_seqlens, {"values": values.where(batch["loss_mask"], 0) if "loss_mask" in batch else values}
        )

    @register(THREE_D, reads=("values", "group_id"))
    def learn(self, batch: Batch, weights: Weights, scale: float) -> Metrics:
        """Sum of values, weighed by sequence; and what the ranks of this call have in all."""
        per_seq = torch.stack([*(v.sum() for v in batch.per_seq(batch["values"])), torch.zeros(())])
        total = (per_seq[:-1] * torch.tensor(weights.values)).sum() * scale
        everywhere = total.clone()
        if self.rank.world > 1:
            dist.all_reduce(everywhere)
        return Metrics().sum("own", float(total)).max("all", float(everywhere)).sum("seqs", batch.num_seqs)

    @register(THREE_D, reads=("group_id",))
    def groups(self, batch: Batch) -> list[int]:
        return sorted(set(batch["group_id"].tolist()))

    @register(ONE_TO_ALL)
    def tell(self) -> tuple[int, int, int, float]:
        return self.rank.rank, self.rank.world, os.getpid(), float(self.weight[0])

    @register(ALL_TO_ALL)
    def own(self, value: int) -> int:
        return value * 10 + self.rank.rank

    @register(RANK_ZERO)
    def lead(self) -> int:
        return self.rank.rank

    @register(ONE_TO_ALL)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(ONE_TO_ALL)
    def meet_but(self, absent: int) -> None:
        """One rank raises, the others wait for it."""
        if self.rank.rank == absent:
            raise ValueError("no\nmeeting")
        dist.barrier()

    @register(THREE_D, reads=("group_id",), writes=("values",))
    def forgets(self, batch: Batch) -> Batch:
        return batch


def make(number: float, rank: Rank) -> Worker:
    return Probe(rank, number)


def broken(rank: Rank) -> Worker:
    raise FileNotFoundError("no model")


def probe(number: float = 0.0) -> Any:
    return partial(make, number)
