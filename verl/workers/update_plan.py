"""Which sequences form which optimizer step. Made on the controller, so no number of ranks changes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl.algos.aggregate import Denominators
from verl.algos.segments import Segments
from verl.config.algorithm import UpdateConfig
from verl.controller.partition import Parts, Splits
from verl.core.batch import Batch
from verl.core.rng import derive_seed, stream


@dataclass(frozen=True)
class MiniBatch:
    """index: sequences, ascending; total: the counts that its loss is divided by; seed: of what its loss draws.

    places: of the sequences in the whole mini-batch, which has `count`, however it is cut.
    """

    index: tuple[int, ...]
    total: Denominators
    seed: int
    places: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class UpdatePlan(Splits):
    minibatches: tuple[MiniBatch, ...]

    @classmethod
    def of(cls, batch: Batch, cfg: UpdateConfig, seed: int, step: int) -> UpdatePlan:
        """cfg.epochs passes of cfg.mini_batches mini-batches; groups stay whole, their order is drawn for each pass.

        A mini-batch without a counted token is left out: a step on a zero gradient would still move the weights, by
        the optimizer's momentum.
        """
        groups = batch["group_id"].tolist()
        numbers = sorted(set(groups))
        members: dict[int, list[int]] = {g: [] for g in numbers}
        for i, g in enumerate(groups):
            members[g].append(i)
        counted = batch.select(("loss_mask", "group_id"))
        out = []
        for epoch in range(cfg.epochs):
            order = stream(seed, "minibatches", step, epoch).permutation(len(numbers))
            for number, part in enumerate(np.array_split(order, cfg.mini_batches)):
                index = tuple(sorted(i for g in part.tolist() for i in members[numbers[g]]))
                mine = counted.take(index)
                total = Denominators.of(Segments.of(mine.cu_seqlens, mine["loss_mask"]), mine["group_id"])
                if total.tokens > 0:
                    own = derive_seed(seed, "policy_loss", step, epoch * cfg.mini_batches + number)
                    out.append(MiniBatch(index, total, own, tuple(range(len(index))), len(index)))
        return cls(tuple(out))

    def split(self, parts: Parts) -> list[UpdatePlan]:
        """One plan a part, of as many mini-batches: their sequences that lie there, by their numbers there. Counts stay
        those of the whole mini-batch, so the gradients of all parts add up to its gradient.
        """
        place = {i: (part, k) for part, members in enumerate(parts) for k, i in enumerate(members)}
        out: list[list[MiniBatch]] = [[] for _ in parts]
        for mini in self.minibatches:
            mine: list[list[tuple[int, int]]] = [[] for _ in parts]
            for i, where in zip(mini.index, mini.places, strict=True):
                part, k = place[i]
                mine[part].append((k, where))
            for plan, pairs in zip(out, mine, strict=True):
                index, places = tuple(k for k, _ in pairs), tuple(where for _, where in pairs)
                plan.append(replace(mini, index=index, places=places))
        return [UpdatePlan(tuple(plan)) for plan in out]
