"""Layout arithmetic: which coordinates a rank has. Pure; knows no process."""

from __future__ import annotations

from dataclasses import dataclass

from verl.core.errors import ConfigError


@dataclass(frozen=True)
class Coord:
    """Place of a rank along the data, pipeline and tensor axes."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the data, pipeline and tensor axes; ranks run through tensor first, data last.

    fsdp: how many neighbours along the data axis share one copy of the weights (FSDP cuts dimension 0 among them, after
    tensor parallelism); 1: each holds its own.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    fsdp: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp", "fsdp"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"{axis}: {getattr(self, axis)} ranks; an axis has 1 or more")
        if self.dp % self.fsdp:
            raise ConfigError(f"fsdp: {self.fsdp} does not divide dp {self.dp}; FSDP cuts along the data axis")

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    def coord(self, rank: int) -> Coord:
        return Coord(rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp)
