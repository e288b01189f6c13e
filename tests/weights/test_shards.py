"""Who holds what: against torch.distributed.tensor, and the groups of the paper."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.weights.cases import Case, cases
from tests.weights.parameters import even
from verl.core.errors import ConfigError, WeightsError
from verl.parallel.layout import Coord, Layout
from verl.weights.boxes import extents, within
from verl.weights.groups import generation_coords
from verl.weights.shards import Parameter, box_of, shards, stages_by_name


def starts(box):
    return tuple(start for start, _ in box)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(0, 1))
def test_a_cut_is_that_of_dtensor(rows, columns, tp, fsdp, cut):
    """torch applies placements from left to right: tensor parallelism first, then FSDP within what is left of
    dimension 0. Public as `compute_local_shape_and_global_offset`, which only looks the coordinate up in a mesh.
    """
    parameter, layout = Parameter("w", (rows, columns), cut), Layout(dp=fsdp, tp=tp, fsdp=fsdp)
    for part, shard in product(range(tp), range(fsdp)):
        shape, offset = _compute_local_shape_and_global_offset(
            (rows, columns), (tp, fsdp), [part, shard], [Cut(cut), Cut(0)]
        )
        box = box_of(parameter, layout, part, shard)
        assert extents(box) == shape
        assert starts(box) == offset or 0 in shape


@pytest.mark.parametrize(("rows", "tp", "fsdp"), [(16, 2, 2), (24, 2, 3), (32, 4, 2), (24, 4, 3)])
def test_fsdp2_after_tensor_parallel_is_the_same_cut(rows, tp, fsdp):
    """FSDP2 writes it as a strided placement on the outer mesh dimension; the rows are those of the nested cut."""
    parameter, layout = Parameter("w", (rows, 3), 0), Layout(dp=fsdp, tp=tp, fsdp=fsdp)
    for part, shard in product(range(tp), range(fsdp)):
        shape, offset = _compute_local_shape_and_global_offset(
            (rows, 3), (fsdp, tp), [shard, part], [_StridedShard(0, split_factor=tp), Cut(0)]
        )
        box = box_of(parameter, layout, part, shard)
        assert (extents(box), starts(box)) == (shape, offset)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_replica_holds_every_element(case: Case):
    """Elements of all ranks together are those of the model, times the replicas of each parameter."""
    held = {p.name: np.zeros(p.shape, int) for p in case.parameters}
    for shard in case.src:
        held[shard.name][tuple(slice(*side) for side in shard.box)] += 1
    stages = stages_by_name(case.parameters, case.train.pp)
    for parameter in case.parameters:
        copies = len(stages[parameter.name]) * case.train.dp // (case.train.fsdp if parameter.shape else 1)
        copies *= 1 if parameter.cut is not None else case.train.tp
        assert (held[parameter.name] == copies).all()


def test_stages_take_whole_layers():
    stages = stages_by_name(even(5), 2)
    assert [min(stages[f"layers.{i}.up"]) for i in range(5)] == [0, 0, 0, 1, 1]
    tied = (*even(5), Parameter("embed", (8, 4), 0, (0, 4)), Parameter("scale", ()))
    assert stages_by_name(tied, 2)["embed"] == {0, 1} and stages_by_name(tied, 4)["embed"] == {0, 3}
    assert stages_by_name(tied, 4)["scale"] == {0, 1, 2, 3}
    with pytest.raises(WeightsError, match="pp 6: the model has 5 layers"):
        stages_by_name(even(5), 6)
    with pytest.raises(WeightsError, match="w: cut along dimension 2"):
        Parameter("w", (3, 4), 2)


def test_the_groups_of_the_paper():
    """Section 5.3, figure 8: 8 ranks, training pp 1, tp 4, dp 2; generation pp 1, tp 2."""
    train, generation = Layout(dp=2, tp=4), Layout(dp=4, tp=2)

    def replicas(groups):
        coords = generation_coords(train, generation, groups)
        return [[r for r, c in enumerate(coords) if c.dp == dp] for dp in range(4)]

    assert replicas("strided") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert replicas("consecutive") == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("train", "generation"),
    [
        (Layout(tp=8), Layout(dp=4, tp=2)),
        (Layout(pp=4, tp=2), Layout(dp=2, pp=2, tp=2)),
        (Layout(dp=2, pp=4, tp=4), Layout(dp=8, pp=2, tp=2)),
        (Layout(dp=8, fsdp=8), Layout(dp=4, tp=2)),
        (Layout(dp=4, tp=2, fsdp=2), Layout(dp=8)),
        (Layout(dp=4, tp=2), Layout(dp=2, tp=4)),
    ],
)
def test_strided_keeps_what_a_rank_holds(train, generation):
    """In the last, generation cuts finer than training: then all that a rank generates with is what it holds."""
    parameters = tuple(p for p in even(8) if p.cut == 0)
    coords = generation_coords(train, generation, "strided")
    assert sorted(coords, key=lambda c: (c.dp, c.pp, c.tp)) == [generation.coord(r) for r in range(train.world)]
    have = {(s.rank, s.name): s.box for s in shards(parameters, train)}
    want = {(s.rank, s.name): s.box for s in shards(parameters, generation, coords)}
    if generation.tp > train.tp * train.fsdp:
        assert all(within(box, have[key]) for key, box in want.items())
    else:
        assert all(within(box, want[key]) for key, box in have.items())


def test_layouts_that_do_not_fit_say_so():
    with pytest.raises(WeightsError, match="is of 4 ranks and the training layout dp 1 x pp 1 x tp 8 of 8"):
        generation_coords(Layout(tp=8), Layout(dp=2, tp=2), "strided")
    with pytest.raises(WeightsError, match="tp 2 neither divides nor is a multiple of the 3 parts"):
        generation_coords(Layout(dp=2, tp=3), Layout(dp=3, tp=2), "strided")
    with pytest.raises(WeightsError, match="fsdp 2; generation does not"):
        generation_coords(Layout(dp=2), Layout(dp=2, fsdp=2), "consecutive")
    with pytest.raises(ConfigError, match="fsdp: 2 does not divide dp 3"):
        Layout(dp=3, fsdp=2)
    with pytest.raises(ConfigError, match="tp: 0 ranks"):
        Layout(tp=0)
    assert Layout(dp=4, fsdp=2).coord(3) == Coord(3, 0, 0)
