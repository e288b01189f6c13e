"""One axis of a mesh as the code that computes along it sees it: a process group, and the own place in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """Ranks 0 .. size - 1 of `group`; `rank` is this process."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class TensorParallel(Axis):
    """The ranks that hold parts of each matrix and compute every token together."""

    @staticmethod
    def of(group: dist.ProcessGroup) -> TensorParallel | None:
        """None where the group is this process alone: then nothing is cut, and no collective is called."""
        size = dist.get_world_size(group)
        return TensorParallel(group, dist.get_rank(group), size) if size > 1 else None


@dataclass(frozen=True)
class PipelineParallel(Axis):
    """The stages of a model; each holds some of its layers, in order."""

    @staticmethod
    def of(group: dist.ProcessGroup) -> PipelineParallel | None:
        """None where the group is this process alone."""
        size = dist.get_world_size(group)
        return PipelineParallel(group, dist.get_rank(group), size) if size > 1 else None
