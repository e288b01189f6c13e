"""What resharding costs, against the formulas of HybridFlow (arXiv:2409.19256, section 5.4, table 2), to the byte.

M: bytes of the model; every parameter is cut evenly. Each rank receives
    all-gather           M (tp pp - 1) / (tp pp)
    planned, strided     M (tp pp - tg pg) / (tg pg tp pp)
and holds M / (tg pg) to generate with.
"""

from fractions import Fraction
from math import prod

import pytest
import torch

from tests.weights.parameters import even, rows
from verl.parallel.layout import Layout
from verl.weights.boxes import numel
from verl.weights.groups import Groups, generation_coords
from verl.weights.plan import Shard, plan
from verl.weights.route import Route
from verl.weights.shards import shards

DTYPE = torch.bfloat16


def received(parameters, train: Layout, generation: Layout, groups: Groups) -> list[int]:
    """Bytes that each rank receives from others, counted in its messages."""
    src = shards(parameters, train)
    dst = shards(parameters, generation, generation_coords(train, generation, groups))
    transfers, dtypes = plan(src, dst), {p.name: DTYPE for p in parameters}
    routes = [Route.of(rank, transfers, src, dst, dtypes, bucket_bytes=1000) for rank in range(train.world)]
    return [sum(m.nbytes for step in route.rounds for m in step.receives) for route in routes]


def gathered(parameters, train: Layout) -> list[int]:
    """The same where every rank wants every parameter whole."""
    src = shards(parameters, train)
    everything = [Shard(r, p.name, tuple((0, n) for n in p.shape)) for r in range(train.world) for p in parameters]
    out = [0] * train.world
    for t in plan(src, everything):
        out[t.dst] += t.numel * DTYPE.itemsize * (t.src != t.dst)
    return out


def model_bytes(parameters) -> int:
    return sum(prod(p.shape) for p in parameters) * DTYPE.itemsize


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(
    ("pp", "tp", "pg", "tg"),
    [
        (1, 4, 1, 2),
        (1, 8, 1, 2),
        (1, 8, 1, 4),
        (1, 4, 1, 1),
        (1, 4, 1, 4),
        (2, 4, 1, 2),
        (4, 2, 2, 2),
        (4, 4, 2, 2),
        (2, 8, 2, 4),
        (8, 2, 4, 1),
    ],
)
def test_strided_groups_receive_what_the_formula_says(dp, pp, tp, pg, tg):
    parameters = even(8)
    train, generation = Layout(dp, pp, tp), Layout(dp * pp * tp // (pg * tg), pg, tg)
    volume = Fraction(model_bytes(parameters) * (tp * pp - tg * pg), tg * pg * tp * pp)
    assert received(parameters, train, generation, "strided") == [volume] * train.world
    consecutive = received(parameters, train, generation, "consecutive")
    assert min(consecutive) >= 0 and sum(consecutive) >= volume * train.world
    coords = generation_coords(train, generation, "strided")
    held = [0] * train.world
    for shard in shards(parameters, generation, coords):
        held[shard.rank] += numel(shard.box) * DTYPE.itemsize
    assert held == [Fraction(model_bytes(parameters), tg * pg)] * train.world


@pytest.mark.parametrize("fsdp", [2, 4])
def test_fsdp_is_a_finer_tensor_axis_where_dimension_0_is_cut(fsdp):
    parameters, tp, tg = rows(4), 2, 2
    train, generation = Layout(dp=fsdp, tp=tp, fsdp=fsdp), Layout(dp=fsdp, tp=tg)
    volume = Fraction(model_bytes(parameters) * (tp * fsdp - tg), tg * tp * fsdp)
    assert received(parameters, train, generation, "strided") == [volume] * train.world


@pytest.mark.parametrize(("tp", "tg", "less"), [(4, 2, "67 %"), (8, 2, "57 %"), (8, 4, "86 %")])
def test_strided_groups_receive_this_much_less_than_all_gather(tp, tg, less):
    """67, 57 and 86 % are what is saved: 1 - (tp - tg) / (tg (tp - 1)) = 2/3, 4/7 and 6/7."""
    parameters = even(4)
    planned = received(parameters, Layout(tp=tp), Layout(dp=tp // tg, tp=tg), "strided")
    whole = gathered(parameters, Layout(tp=tp))
    assert whole == [Fraction(model_bytes(parameters) * (tp - 1), tp)] * tp
    saved = {1 - Fraction(ours, theirs) for ours, theirs in zip(planned, whole, strict=True)}
    assert saved == {1 - Fraction(tp - tg, tg * (tp - 1))}
    assert f"{float(saved.pop()):.0%}".replace("%", " %") == less


def test_all_gather_across_stages():
    parameters = even(4)
    assert gathered(parameters, Layout(pp=2, tp=2)) == [Fraction(model_bytes(parameters) * 3, 4)] * 4


def test_finer_generation_moves_nothing():
    assert received(rows(4), Layout(dp=4), Layout(dp=2, tp=2), "strided") == [0] * 4
    assert received(even(4), Layout(dp=4, tp=2), Layout(dp=2, tp=4), "strided") == [0] * 8
