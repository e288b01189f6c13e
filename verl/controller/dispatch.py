"""Dispatch protocols as values: which shard of a batch a rank gets, and which ranks answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from verl.parallel.layout import Coord, Layout


@dataclass(frozen=True)
class Dispatch:
    """shard: data shard for a coordinate, None for the whole batch; answers: whether its answer counts."""

    name: str
    shard: Callable[[Coord], int | None] = field(repr=False)
    answers: Callable[[Coord, Layout], bool] = field(repr=False)


ONE_TO_ALL = Dispatch("one_to_all", lambda c: None, lambda c, layout: True)
RANK_ZERO = Dispatch("rank_zero", lambda c: None, lambda c, layout: c == Coord(0, 0, 0))
DP = Dispatch("dp", lambda c: c.dp, lambda c, layout: c.tp == 0 and c.pp == layout.pp - 1)
