"""Dispatch protocols as values: which ranks run a call, which part of the batch each gets, whose answers count.

The table of transfer protocols of HybridFlow (arXiv:2409.19256, appendix B), and RANK_ZERO. All functions here are
pure and at module level, so that a value can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from verl.core.batch import Batch
from verl.core.metrics import Metrics
from verl.parallel.layout import Coord, Layout

Gives = Literal["whole", "parts", "per_rank"]
"""What ranks get. `whole`: all of it; `parts`: a part of the batch each; `per_rank`: the caller's one value a rank."""


@dataclass(frozen=True)
class Dispatch:
    """parts: into how many the batch is cut; part: which of them the rank at a coordinate gets; runs: whether it is
    called at all; answers: whether what it returns counts.

    Where gives is `parts`, the ranks that answer hold each part exactly once.
    """

    name: str
    gives: Gives
    parts: Callable[[Layout], int] = field(repr=False)
    part: Callable[[Coord, Layout], int] = field(repr=False)
    answers: Callable[[Coord, Layout], bool] = field(repr=False)
    runs: Callable[[Coord, Layout], bool] = field(repr=False)

    def part_of(self, rank: int, layout: Layout) -> int:
        return self.part(layout.coord(rank), layout)

    def running(self, layout: Layout) -> list[int]:
        """Ranks that are called, ascending."""
        return [r for r in range(layout.world) if self.runs(layout.coord(r), layout)]

    def answering(self, layout: Layout) -> list[int]:
        """Ranks whose answers count, ascending; all of them run."""
        return [r for r in self.running(layout) if self.answers(layout.coord(r), layout)]

    def merge(self, answers: Sequence[Any]) -> Any:
        """Answers in order of rank as one value: metrics merge, batches are one, RANK_ZERO's is the value itself, and
        any others are a list, one a rank that answers.
        """
        if self.name == RANK_ZERO.name:
            (answer,) = answers
            return answer
        if answers and all(isinstance(a, Metrics) for a in answers):
            return Metrics.merge(answers)
        if self.gives == "parts" and answers and all(isinstance(a, Batch) for a in answers):
            return Batch.concat(answers)
        return list(answers)


def _one(layout: Layout) -> int:
    return 1


def _first(coord: Coord, layout: Layout) -> int:
    return 0


def _always(coord: Coord, layout: Layout) -> bool:
    return True


def _is_rank_zero(coord: Coord, layout: Layout) -> bool:
    return coord == Coord(0, 0, 0)


def _world(layout: Layout) -> int:
    return layout.world


def _rank(coord: Coord, layout: Layout) -> int:
    return (coord.dp * layout.pp + coord.pp) * layout.tp + coord.tp


def _dp_size(layout: Layout) -> int:
    return layout.dp


def _dp(coord: Coord, layout: Layout) -> int:
    return coord.dp


def _has_output(coord: Coord, layout: Layout) -> bool:
    """The last pipeline stage has the model's output, and every tensor rank of it the same."""
    return coord.pp == layout.pp - 1 and coord.tp == 0


def _is_stage(coord: Coord, layout: Layout) -> bool:
    return coord.dp == 0 and coord.tp == 0


def _replicas(layout: Layout, pp: int, tp: int) -> int:
    """Copies of the generating model: dp times those that a training replica becomes."""
    if layout.pp % pp or layout.tp % tp:
        raise ValueError(
            f"generation with pp={pp}, tp={tp} does not divide training with pp={layout.pp}, tp={layout.tp}"
        )
    return layout.dp * (layout.pp // pp) * (layout.tp // tp)


def _replica(coord: Coord, layout: Layout, pp: int, tp: int) -> int:
    """Neighbours along an axis are in different copies, so that each keeps the weights that it holds."""
    wide, high = layout.tp // tp, layout.pp // pp
    return (coord.dp * high + coord.pp % high) * wide + coord.tp % wide


def _leads_replica(coord: Coord, layout: Layout, pp: int, tp: int) -> bool:
    return coord.pp < layout.pp // pp and coord.tp < layout.tp // tp


def three_d_all_micro_dp(pp: int = 1, tp: int = 1) -> Dispatch:
    """Each copy of the model that generates with `pp` and `tp` gets a part; its first rank answers. pp and tp divide
    those of training (arXiv:2409.19256, section 5.3: generation groups are strided, micro-dp groups are consecutive).
    """
    return Dispatch(
        f"three_d_all_micro_dp[pp={pp},tp={tp}]",
        "parts",
        partial(_replicas, pp=pp, tp=tp),
        partial(_replica, pp=pp, tp=tp),
        partial(_leads_replica, pp=pp, tp=tp),
        _always,
    )


ONE_TO_ALL = Dispatch("one_to_all", "whole", _one, _first, _always, _always)
"""All get the same and all answer."""
ALL_TO_ALL = Dispatch("all_to_all", "per_rank", _one, _first, _always, _always)
"""Every argument is a sequence with one value a rank; all answer."""
RANK_ZERO = Dispatch("rank_zero", "whole", _one, _first, _is_rank_zero, _is_rank_zero)
"""Rank 0 alone runs."""
DP = Dispatch("dp", "parts", _world, _rank, _always, _always)
"""Every rank is a replica of its own: it gets a part and answers for it."""
THREE_D = Dispatch("three_d", "parts", _dp_size, _dp, _has_output, _always)
"""A part for each data-parallel replica, all of whose ranks get it; the first tensor rank of the last stage answers."""
THREE_D_ALL_MICRO_DP = three_d_all_micro_dp()
"""As `three_d_all_micro_dp`, for generation in which every rank holds the whole model."""
THREE_D_PP_ONLY = Dispatch("three_d_pp_only", "whole", _one, _first, _is_stage, _always)
"""All get the same; one rank of every pipeline stage answers (what tensors a stage has, for example)."""
