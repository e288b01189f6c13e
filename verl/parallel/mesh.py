"""The place of this process in a layout, and the process groups along its axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.core.errors import ConfigError
from verl.parallel.axes import PipelineParallel, TensorParallel
from verl.parallel.layout import Coord, Layout
from verl.parallel.replicas import sum_over

DIMS = ("pp", "replicate", "shard", "tp")
"""Axes of the device mesh. Data parallelism is two of them: `shard`, the fsdp neighbours that hold a model together,
and `replicate`, the copies of it that they make."""


@dataclass(frozen=True)
class Mesh:
    """rank: of this process, from 0. device: kind that its tensors are on while collectives move them (cpu: gloo, cuda:
    nccl). axes: named DIMS; None in a world of one, which needs no torch.distributed.
    """

    rank: int = 0
    layout: Layout = field(default_factory=Layout)
    device: str = "cpu"
    axes: DeviceMesh | None = field(default=None, repr=False, compare=False)

    @classmethod
    def single(cls, device: str = "cpu") -> Mesh:
        """One process that holds everything."""
        return cls(device=device)

    @classmethod
    def of(cls, layout: Layout, device: str = "cpu", path: str = "parallel") -> Mesh:
        """The mesh of a process that has called init_process_group. All processes of the world call it, alike.

        path: section of the configuration that `layout` comes from, for the message. ConfigError: the world has
        another size than the layout.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != layout.world:
            sizes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("dp", "pp", "tp"))
            raise ConfigError(
                f"{path}: {sizes} is {layout.world} ranks, but {world} process{'es run' if world > 1 else ' runs'}; "
                f"set {path}.dp, {path}.pp and {path}.tp to a product of {world}, or start {layout.world}"
            )
        if world == 1:
            return cls.single(device)
        return cls(dist.get_rank(), layout, device, _axes(layout, device))

    @property
    def coord(self) -> Coord:
        return self.layout.coord(self.rank)

    @property
    def first(self) -> bool:
        """Whether this rank keeps and writes what all ranks gather."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether parameters are cut over the data axis."""
        return self.layout.fsdp > 1

    def data_axes(self) -> DeviceMesh:
        """What FSDP cuts over: [shard], or [replicate, shard] where there are copies."""
        assert self.axes is not None, "a world of one has no axes"
        return self.axes["shard"] if self.layout.fsdp == self.layout.dp else self.axes["replicate", "shard"]

    def tensor(self) -> TensorParallel | None:
        """The tensor axis; None where it is this rank alone."""
        return None if self.axes is None else TensorParallel.of(self.axes.get_group("tp"))

    def pipeline(self) -> PipelineParallel | None:
        """The pipeline axis; None where it is this rank alone."""
        return None if self.axes is None else PipelineParallel.of(self.axes.get_group("pp"))

    def sum(self, values: Tensor, *dims: str) -> Tensor:
        """values, which every rank along `dims` has, added up; a copy on `device`, or values themselves in a world of
        one.
        """
        if self.axes is None:
            return values
        out = values.to(self.device, copy=True)
        for group in self._groups(dims):
            dist.all_reduce(out, group=group)
        return out

    def most(self, count: int) -> int:
        """The highest count that a rank of the data axis has."""
        if self.axes is None:
            return count
        out = torch.tensor(count, device=self.device)
        for group in self._groups(("shard", "replicate")):
            dist.all_reduce(out, dist.ReduceOp.MAX, group=group)
        return int(out)

    def add_up(self, tensors: Sequence[Tensor], dim: str) -> None:
        """Each tensor becomes the sum of its fellows along `dim`, in place."""
        for group in self._groups((dim,)):
            sum_over(tensors, group)

    def _groups(self, dims: Sequence[str]) -> Iterator[dist.ProcessGroup]:
        """Groups of this rank along `dims` that hold others too."""
        for dim in dims:
            if self.axes is not None and self.axes[dim].size() > 1:
                yield self.axes.get_group(dim)


SINGLE = Mesh.single()


def _axes(layout: Layout, device: str) -> DeviceMesh:
    """Ranks as `Layout.coord` numbers them: data last, so outermost; the copies beyond the fsdp neighbours."""
    shape = (layout.dp // layout.fsdp, layout.fsdp, layout.pp, layout.tp)
    ranks = torch.arange(layout.world).view(shape).permute(2, 0, 1, 3)
    return DeviceMesh(device, ranks, mesh_dim_names=DIMS)
