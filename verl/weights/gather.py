"""The way that resharding is compared with: every rank gathers each parameter whole, then cuts out its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from verl.parallel.layout import Layout
from verl.weights.boxes import Box, extents, numel, slices, whole
from verl.weights.shards import Parameter, box_of, stages_by_name
from verl.weights.traffic import Traffic
from verl.weights.transport import DEADLINE_SECONDS
from verl.weights.waiting import Deadline

_Axes = tuple[str, ...]


class AllGather:
    """One rank's side, with the methods of `Transport`. Every rank of the default process group makes one.

    Parameter by parameter: all-gather along the axes that cut it (pieces padded to one size), then a broadcast from the
    stage that has it to the others. A rank receives M (tp pp - 1) / (tp pp) of a model of M bytes where every parameter
    is cut evenly. Memory peaks at the generation shards and one parameter (two where it was not cut along dimension 0);
    gathering the whole model first, as the systems do that the paper compares with, would hold all M.

    wants: this rank's box of each name in the layout that generates.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        dtypes: Mapping[str, torch.dtype],
        train: Layout,
        wants: Mapping[str, Box],
        device: torch.device | str = "cpu",
        deadline_seconds: float = DEADLINE_SECONDS,
    ):
        self.parameters, self.dtypes, self.train, self.wants = parameters, dtypes, train, wants
        self.device, self.deadline_seconds = torch.device(device), deadline_seconds
        self.rank = dist.get_rank()
        self.coord = train.coord(self.rank)
        self.traffic = Traffic()
        self._stages = stages_by_name(parameters, train.pp)
        kinds = sorted({axes for parameter in parameters if (axes := self._axes(parameter))})
        kinds += [("pp",)] if train.pp > 1 else []
        # Kinds come in one order on all ranks; groups of a kind share no rank.
        self._groups = {
            axes: dist.new_group([rank for rank, _ in self._members(axes)], use_local_synchronization=True)
            for axes in kinds
        }

    def names(self) -> set[str]:
        """Names of the shards that this rank generates with."""
        return set(self.wants)

    def collect(self, have: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All of `stream` at once."""
        return dict(self.stream(have))

    def stream(self, have: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, shard) of what this rank generates with; a parameter that was whole here is a view of it."""
        self.traffic = Traffic()
        for parameter in self.parameters:
            part = self._part(parameter, have)
            if part is not None:
                yield parameter.name, part
            del part  # the receiver decides how long it lives

    def _part(self, parameter: Parameter, have: Mapping[str, Tensor]) -> Tensor | None:
        before = self.traffic.buffers
        full, part = self._gathered(parameter, have), None
        box = self.wants.get(parameter.name)
        if box is not None:
            nbytes = numel(box) * full.itemsize
            part = full[slices(box, whole(parameter.shape))]
            if self.traffic.buffers > before:  # the whole parameter is freed: its part needs memory of its own
                part = part.clone(memory_format=torch.contiguous_format)
                self.traffic.make(nbytes)
                self.traffic.hand_over(nbytes)
            else:
                self.traffic.kept += nbytes
        self.traffic.give_back(self.traffic.buffers - before)
        return part

    def _gathered(self, parameter: Parameter, have: Mapping[str, Tensor]) -> Tensor:
        stages, axes = self._stages[parameter.name], self._axes(parameter)
        # Another stage that has it too (a tied embedding) gets it like those that have not.
        here = self.coord.pp == min(stages) or len(stages) == self.train.pp
        if here and axes:
            full = self._all_gather(parameter, axes, have)
        elif here:
            full = have[parameter.name].detach()
        else:
            full = self._empty(parameter.shape, parameter.name)
        if len(stages) < self.train.pp:
            self._broadcast(parameter, full, min(stages))
        return full

    def _all_gather(self, parameter: Parameter, axes: _Axes, have: Mapping[str, Tensor]) -> Tensor:
        name, members = parameter.name, self._members(axes)
        boxes = [box_of(parameter, self.train, tp, fsdp) for _, (tp, fsdp) in members]
        longest = max(numel(box) for box in boxes)
        before = self.traffic.buffers
        own = self._padded(name, have, longest)
        flat = self._empty((longest * len(members),), name)
        work = dist.all_gather(list(flat.chunk(len(members))), own, group=self._groups[axes], async_op=True)
        nbytes = longest * flat.itemsize * (len(members) - 1)
        self._wait(work, f"{nbytes:,} bytes of {name} from ranks {[rank for rank, _ in members]}")
        self.traffic.sent += nbytes
        self.traffic.received += nbytes
        if all(numel(box) == longest for box in boxes) and _stacked(boxes):
            return flat.view(parameter.shape)
        gathered = self.traffic.buffers - before
        full = self._empty(parameter.shape, name)
        for number, box in enumerate(boxes):
            start = number * longest
            full[slices(box, whole(parameter.shape))] = flat[start : start + numel(box)].view(extents(box))
        self.traffic.give_back(gathered)
        return full

    def _padded(self, name: str, have: Mapping[str, Tensor], size: int) -> Tensor:
        """This rank's elements in one row of `size`; an empty shard is left out of `have`."""
        if name in have and have[name].numel() == size:
            return have[name].detach().reshape(-1)
        row = self._empty((size,), name)
        if name in have:
            row[: have[name].numel()] = have[name].detach().reshape(-1)
        return row

    def _broadcast(self, parameter: Parameter, full: Tensor, stage: int) -> None:
        ranks = [rank for rank, _ in self._members(("pp",))]
        src = ranks[stage]
        work = dist.broadcast(full, src, group=self._groups["pp",], async_op=True)
        nbytes = prod(parameter.shape) * full.itemsize
        self._wait(work, f"{nbytes:,} bytes of {parameter.name} from rank {src} to ranks {ranks}")
        if self.rank == src:
            self.traffic.sent += nbytes * (len(ranks) - 1)
        else:
            self.traffic.received += nbytes

    def _wait(self, work: dist.Work | None, what: str) -> None:
        assert work is not None  # this rank is a member of the group
        Deadline(self.deadline_seconds, self.device.type != "cpu").wait(work, f"rank {self.rank}: {what}")

    def _empty(self, shape: tuple[int, ...], name: str) -> Tensor:
        self.traffic.borrow(prod(shape) * self.dtypes[name].itemsize)
        return torch.empty(shape, dtype=self.dtypes[name], device=self.device)

    def _axes(self, parameter: Parameter) -> _Axes:
        """Axes of more than one rank that cut the parameter."""
        tensor = parameter.cut is not None and self.train.tp > 1
        return (("tp",) if tensor else ()) + (("fsdp",) if parameter.shape and self.train.fsdp > 1 else ())

    def _members(self, axes: _Axes) -> list[tuple[int, tuple[int, int]]]:
        """(rank, (tp, fsdp)) of those that differ from this rank along these axes only, by rank as groups have them."""
        train, at = self.train, self.coord
        shard = at.dp % train.fsdp
        return sorted(
            (((at.dp - shard + f) * train.pp + p) * train.tp + t, (t, f))
            for t in (range(train.tp) if "tp" in axes else [at.tp])
            for f in (range(train.fsdp) if "fsdp" in axes else [shard])
            for p in (range(train.pp) if "pp" in axes else [at.pp])
        )


def _stacked(boxes: Sequence[Box]) -> bool:
    """Whether these boxes of one size, one after the other, are the tensor itself: cut along dimension 0 alone."""
    return all(before[0][1] == box[0][0] and before[1:] == box[1:] for before, box in pairwise(boxes))
