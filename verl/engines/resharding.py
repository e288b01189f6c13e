"""From the layout that trains to the one that generates: each rank's route, made by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from verl.engines.train.engine import EmbeddedTrainEngine
from verl.engines.train.holding import Holding
from verl.parallel.axes import TensorParallel
from verl.parallel.layout import Coord
from verl.weights.boxes import Box, numel
from verl.weights.groups import replicas
from verl.weights.plan import Shard, plan
from verl.weights.route import Route
from verl.weights.transport import Transport

Boxes = dict[str, Box]


def generation_axis(places: Sequence[Coord]) -> TensorParallel | None:
    """The tensor axis of this process's replica. places: of every rank (`generation_places`). All ranks call it."""
    mine = None
    for ranks in replicas(places):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks and len(ranks) > 1:
            mine = TensorParallel.of(group)
    return mine


def transport(engine: EmbeddedTrainEngine, generating: nn.Module, deadline_seconds: float) -> Transport:
    """What carries the weights of `engine` into `generating`, which may be cut in another way. All ranks call it."""
    dtypes = {name: tensor.dtype for name, tensor in engine.shards().items()}
    told: list[tuple[Boxes, Boxes, dict[str, torch.dtype]]] = [({}, {}, {})] * dist.get_world_size()
    dist.all_gather_object(told, (_boxes(engine.module), _boxes(generating), dtypes))
    src, dst = _shards([some[0] for some in told]), _shards([some[1] for some in told])
    every = {name: dtype for _, _, some in told for name, dtype in some.items()}
    route = Route.of(dist.get_rank(), plan(src, dst), src, dst, every)
    return Transport(route, device=engine.device, deadline_seconds=deadline_seconds)


def _boxes(module: nn.Module) -> Boxes:
    holding = Holding.of(module)
    boxes = {name: holding.box(name, p) for name, p in module.named_parameters()}
    return {name: box for name, box in boxes.items() if numel(box)}


def _shards(told: Sequence[Boxes]) -> list[Shard]:
    return [Shard(rank, name, box) for rank, some in enumerate(told) for name, box in some.items()]
