"""Which ranks generate together: the place of every training rank in the layout that generates. Pure.

HybridFlow, arXiv:2409.19256, section 5.3. Training tp 4, generation tp 2, so two micro data parallel replicas a model:

    consecutive   [0 1] [2 3]   as ranks are numbered; rank 1 holds the second quarter and needs the second half
    strided       [0 2] [1 3]   ranks 0 and 1 generate with the first half, and each holds a part of it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from verl.core.errors import WeightsError
from verl.parallel.layout import Coord, Layout

Groups = Literal["strided", "consecutive"]


def generation_places(train: Layout, tp: int) -> tuple[Coord, ...]:
    """Coordinate of each rank of `train` among replicas that generate with `tp` tensor ranks and no pipeline.

    Strided where that is defined and keeps the ranks of a replica in order, as process groups number them; consecutive
    elsewhere (tp does not fit the parts of training, or FSDP is cut finer than generation). Either is right: they
    differ in the bytes that move.
    """
    generation = Layout(dp=train.world // tp, tp=tp)
    parts = train.tp * train.fsdp
    if tp == train.tp and train.pp == 1:
        return tuple(train.coord(rank) for rank in range(train.world))
    if parts % tp and tp % parts:
        return generation_coords(train, generation, "consecutive")
    places = generation_coords(train, generation, "strided")
    in_order = all([places[rank].tp for rank in ranks] == list(range(tp)) for ranks in replicas(places))
    return places if in_order else generation_coords(train, generation, "consecutive")


def replicas(places: Sequence[Coord]) -> list[list[int]]:
    """Ranks of each replica, ascending."""
    count = 1 + max(place.dp for place in places)
    return [[rank for rank, place in enumerate(places) if place.dp == dp] for dp in range(count)]


def generation_coords(train: Layout, generation: Layout, groups: Groups) -> tuple[Coord, ...]:
    """Coordinate in `generation` of each rank of `train`; generation.dp counts all replicas, micro ones too.

    strided: what a rank holds lies in what it generates with wherever the axes of `generation` are divisors of those of
    `train` (fsdp counts as a finer tensor axis), and the replicas of one training replica are neighbours.
    WeightsError: the worlds differ, or neither size of an axis divides the other.
    """
    if generation.world != train.world:
        raise WeightsError(
            f"generation layout {_said(generation)} is of {generation.world} ranks and the training layout "
            f"{_said(train)} of {train.world}; both use the same ranks"
        )
    if generation.fsdp > 1:
        raise WeightsError(f"generation layout: fsdp {generation.fsdp}; generation does not cut weights by FSDP")
    if groups == "consecutive":
        return tuple(generation.coord(rank) for rank in range(train.world))
    return tuple(_strided(train.coord(rank), train, generation) for rank in range(train.world))


def _strided(at: Coord, train: Layout, generation: Layout) -> Coord:
    stage, stage_spare, stages = _coarser(at.pp, train.pp, generation.pp, "pp")
    # FSDP cuts after tensor parallelism, so a rank's rows are number tp * fsdp + shard of tp * fsdp.
    part, part_spare, parts = _coarser(
        at.tp * train.fsdp + at.dp % train.fsdp, train.tp * train.fsdp, generation.tp, "tp"
    )
    # What is not used up by the coarser axes tells replicas apart, or cuts finer where generation has the larger axis.
    spare = (at.dp // train.fsdp * stages + stage_spare) * parts + part_spare
    spare, stage = _finer(spare, stage, train.pp, generation.pp)
    spare, part = _finer(spare, part, train.tp * train.fsdp, generation.tp)
    return Coord(spare, stage, part)


def _coarser(at: int, train: int, generation: int, axis: str) -> tuple[int, int, int]:
    """(place on the generating axis, place among those that fall together there, how many do)."""
    if train % generation and generation % train:
        raise WeightsError(
            f"generation layout: {axis} {generation} neither divides nor is a multiple of the {train} parts of "
            "training; choose one that does, or consecutive groups"
        )
    together = max(1, train // generation)
    return at // together, at % together, together


def _finer(spare: int, at: int, train: int, generation: int) -> tuple[int, int]:
    """(what is left of `spare`, place on the generating axis) where that axis is the longer one."""
    cut = max(1, generation // train)
    return spare // cut, at * cut + spare % cut


def _said(layout: Layout) -> str:
    return f"dp {layout.dp} x pp {layout.pp} x tp {layout.tp}"
