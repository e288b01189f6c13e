"""Who holds what: from parameters and a layout to shards. Pure; knows no process and no torch.

Three cuts, in this order: pipeline stages take whole layers, tensor parallelism cuts the dimension that a parameter
names, FSDP cuts dimension 0 of what is left. A dimension is cut as torch.distributed.tensor does (`Shard(dim)`): pieces
of ceil(size / parts), so that the last ones may be smaller, or empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl.core.errors import WeightsError
from verl.parallel.layout import Coord, Layout
from verl.weights.boxes import Box, numel, whole
from verl.weights.plan import Shard


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model, whole.

    cut: the dimension that tensor parallelism cuts, None where every tensor rank holds all of it.
    layers: the layers (0 the first) that use it, so the stages that hold it; empty for every stage. A tied embedding is
    of the first and the last layer.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.cut is not None and not 0 <= self.cut < len(self.shape):
            raise WeightsError(f"{self.name}: cut along dimension {self.cut}, but its shape is {self.shape}")


def chunk(start: int, end: int, parts: int, number: int) -> tuple[int, int]:
    """Interval `number` of `parts` in [start, end); empty (at the end) where there are none left."""
    size = -(-(end - start) // parts)
    return min(start + number * size, end), min(start + (number + 1) * size, end)


def stages_by_name(parameters: Iterable[Parameter], stages: int) -> dict[str, frozenset[int]]:
    """The pipeline stages that hold each parameter: layer i of n is in stage i * stages // n, so that the stages of a
    number that divides another are unions of the other's. Layers are 0 to the highest that a parameter names.

    WeightsError: fewer layers than stages.
    """
    parameters = list(parameters)
    layers = 1 + max((layer for parameter in parameters for layer in parameter.layers), default=0)
    if stages > layers:
        raise WeightsError(f"pp {stages}: the model has {layers} layers, and each stage needs one")
    return {
        parameter.name: frozenset(layer * stages // layers for layer in parameter.layers) or frozenset(range(stages))
        for parameter in parameters
    }


def shards(parameters: Iterable[Parameter], layout: Layout, coords: Sequence[Coord] | None = None) -> list[Shard]:
    """What every rank of the layout holds, parameter by parameter; empty shards are left out.

    coords: of each rank, in `layout`; None: as the layout numbers them. For generation: `groups.generation_coords`.
    """
    parameters = list(parameters)
    at = [layout.coord(rank) for rank in range(layout.world)] if coords is None else coords
    stages = stages_by_name(parameters, layout.pp)
    out = []
    for parameter in parameters:
        boxes = {
            (part, shard): box_of(parameter, layout, part, shard)
            for part in range(layout.tp)
            for shard in range(layout.fsdp)
        }
        for rank, coord in enumerate(at):
            box = boxes[coord.tp, coord.dp % layout.fsdp]
            if coord.pp in stages[parameter.name] and numel(box):
                out.append(Shard(rank, parameter.name, box))
    return out


def box_of(parameter: Parameter, layout: Layout, part: int, shard: int) -> Box:
    """What tensor rank `part` and FSDP rank `shard` hold of it, in the stages that have it."""
    box = list(whole(parameter.shape))
    if parameter.cut is not None:
        box[parameter.cut] = chunk(*box[parameter.cut], layout.tp, part)
    if box:  # a scalar has no dimension 0: every FSDP rank holds it
        box[0] = chunk(*box[0], layout.fsdp, shard)
    return tuple(box)
