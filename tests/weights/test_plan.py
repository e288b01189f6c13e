"""The resharding plan on random layouts, carried out in numpy: every destination element once, with its value."""

from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings

from tests.weights.cases import Case, cases
from verl.core.errors import WeightsError
from verl.weights.boxes import intersect, numel, within
from verl.weights.plan import Shard, plan


def part(array, box, origin):
    """`box` of an array that holds `origin`, by arithmetic of the test's own."""
    for axis, ((start, end), (zero, _)) in enumerate(zip(box, origin, strict=True)):
        assert zero <= start < end <= zero + array.shape[axis]
        array = array.take(range(start - zero, end - zero), axis=axis)
    return array


@settings(max_examples=400, deadline=None)
@given(cases())
def test_every_destination_element_arrives_once_and_is_right(case: Case):
    truth = {p.name: np.arange(1, prod(p.shape) + 1).reshape(p.shape) for p in case.parameters}
    everything = {p.name: tuple((0, n) for n in p.shape) for p in case.parameters}
    src, dst = case.src, case.dst
    boxes = {(s.rank, s.name): s.box for s in src}
    local = {(s.rank, s.name): part(truth[s.name], s.box, everything[s.name]) for s in src}
    got = {(d.rank, d.name): np.zeros_like(truth[d.name]) for d in dst}
    for t in plan(src, dst):
        index = tuple(slice(*side) for side in t.box)
        got[t.dst, t.name][index] += part(local[t.src, t.name], t.box, boxes[t.src, t.name])
    for d in dst:
        expected = np.zeros_like(truth[d.name])
        index = tuple(slice(*side) for side in d.box)
        expected[index] = truth[d.name][index]
        # A second arrival would be added to the first, one outside of the box would not be 0.
        np.testing.assert_array_equal(got[d.rank, d.name], expected)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_own_memory_first_then_the_least_loaded_holder(case: Case):
    src, dst = case.src, case.dst
    holders = {}
    for s in src:
        holders.setdefault(s.name, {})[s.rank] = s.box
    load, received = Counter(), Counter()
    for t in plan(src, dst):
        able = [rank for rank, box in holders[t.name].items() if within(t.box, box)]
        if t.src == t.dst:
            continue
        assert t.dst not in able
        assert t.src == min(able, key=lambda rank: (load[rank], rank))
        load[t.src] += t.numel
        received[t.dst, t.name] += t.numel
    for d in dst:
        own = holders[d.name].get(d.rank)
        both = intersect(d.box, own) if own is not None else None
        assert received[d.rank, d.name] == numel(d.box) - (0 if both is None else numel(both))


def test_sources_that_overlap_are_cut_where_they_do():
    src = [Shard(0, "w", ((0, 6),)), Shard(1, "w", ((4, 10),)), Shard(2, "w", ((0, 10),))]
    transfers = plan(src, [Shard(rank, "w", ((0, 10),)) for rank in (3, 4, 5)])
    for rank in (3, 4, 5):
        mine = sorted(t.box[0] for t in transfers if t.dst == rank)
        assert mine[0][0] == 0 and mine[-1][1] == 10
        assert all(a[1] == b[0] for a, b in pairwise(mine))
    sent = Counter()
    for t in transfers:
        sent[t.src] += t.numel
    assert sum(sent.values()) == 30 and max(sent.values()) <= 12


def test_a_shard_that_is_within_its_own_source_is_one_transfer():
    src = [Shard(0, "w", ((0, 8), (0, 4))), Shard(1, "w", ((0, 5), (0, 4)))]
    (transfer,) = plan(src, [Shard(0, "w", ((2, 8), (1, 3)))])
    assert (transfer.src, transfer.dst, transfer.box) == (0, 0, ((2, 8), (1, 3)))


def test_what_nobody_holds_is_an_error():
    with pytest.raises(WeightsError, match=r"w: no rank holds \(\(4, 6\),\) of it"):
        plan([Shard(0, "w", ((0, 4),))], [Shard(1, "w", ((0, 6),))])
    with pytest.raises(WeightsError, match="v: no rank holds"):
        plan([], [Shard(1, "v", ((0, 6),))])
    with pytest.raises(WeightsError, match="w: rank 0 holds two shards"):
        plan([Shard(0, "w", ((0, 4),)), Shard(0, "w", ((4, 6),))], [])
