"""Layout arithmetic: which coordinates a rank has. Pure; knows no process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coord:
    """Place of a rank along the data, pipeline and tensor axes."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the data, pipeline and tensor axes; ranks run through tensor first, data last."""

    dp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    def coord(self, rank: int) -> Coord:
        return Coord(rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp)
