"""What a process knows of its place among the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from verl.controller.worker import Worker
from verl.parallel.layout import Coord, Layout


@dataclass(frozen=True)
class Rank:
    """rank: from 0, of `layout.world`; master: host and port of the store that torch.distributed met at, ("", 0) in a
    world of one.
    """

    rank: int = 0
    layout: Layout = field(default_factory=Layout)
    master: tuple[str, int] = ("", 0)

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def coord(self) -> Coord:
        return self.layout.coord(self.rank)

    @property
    def first(self) -> bool:
        """Whether this rank tells what all ranks know."""
        return self.rank == 0


Make = Callable[[Rank], Worker]
"""Makes the worker of a role, in the process where it lives; it must be picklable."""
