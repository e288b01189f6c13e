"""Which sequences form which optimizer step. Made on the controller, so no number of ranks changes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl.algos.aggregate import Denominators
from verl.algos.segments import Segments
from verl.config.algorithm import UpdateConfig
from verl.core.batch import Batch
from verl.core.rng import stream


@dataclass(frozen=True)
class MiniBatch:
    """index: sequences, ascending; total: the counts that its loss is divided by."""

    index: tuple[int, ...]
    total: Denominators


@dataclass(frozen=True)
class UpdatePlan:
    minibatches: tuple[MiniBatch, ...]

    @classmethod
    def of(cls, batch: Batch, cfg: UpdateConfig, seed: int, step: int) -> UpdatePlan:
        """cfg.epochs passes of cfg.mini_batches mini-batches; groups stay whole, their order is drawn for each pass."""
        groups = batch["group_id"].tolist()
        numbers = sorted(set(groups))
        members: dict[int, list[int]] = {g: [] for g in numbers}
        for i, g in enumerate(groups):
            members[g].append(i)
        counts = Segments.of(batch.cu_seqlens, batch["loss_mask"]).counts
        out = []
        for epoch in range(cfg.epochs):
            order = stream(seed, "minibatches", step, epoch).permutation(len(numbers))
            for part in np.array_split(order, cfg.mini_batches):
                index = tuple(sorted(i for g in part.tolist() for i in members[numbers[g]]))
                mine = counts[list(index)]
                out.append(MiniBatch(index, Denominators(float(mine.sum()), float((mine > 0).sum()))))
        return cls(tuple(out))
