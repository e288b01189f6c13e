"""Transfer protocols and the partition of a batch, over random layouts; no process."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.controller import dispatch as d
from verl.controller.partition import order, partition
from verl.controller.worker import register
from verl.core.batch import Batch, cumulative
from verl.core.metrics import Metrics
from verl.parallel.layout import Coord, Layout

sizes = st.integers(1, 4)
layouts = st.builds(Layout, dp=sizes, pp=sizes, tp=sizes)
FIXED = (d.ONE_TO_ALL, d.ALL_TO_ALL, d.RANK_ZERO, d.DP, d.THREE_D, d.THREE_D_ALL_MICRO_DP, d.THREE_D_PP_ONLY)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@st.composite
def micro_dp(draw) -> tuple[Layout, int, int]:
    layout = draw(layouts)
    return layout, draw(st.sampled_from(divisors(layout.pp))), draw(st.sampled_from(divisors(layout.tp)))


def batch_of(lengths: list[int], groups: list[int]) -> Batch:
    return Batch(
        cumulative(torch.tensor(lengths, dtype=torch.int64)),
        {"token_ids": torch.arange(sum(lengths)), "group_id": torch.tensor(groups, dtype=torch.int64)},
    )


@given(layouts, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=20), st.sampled_from(FIXED[3:6]))
def test_a_call_on_parts_reaches_whom_it_must_and_gives_the_batch_back(layout, rows, protocol) -> None:
    """Each sequence is on all ranks of exactly one part, is answered once, and merging restores the order."""
    batch = batch_of([n for n, _ in rows], [g for _, g in rows])
    parts = partition(batch.lengths.tolist(), protocol.parts(layout))
    assert protocol.running(layout) == list(range(layout.world))
    holders = {r: parts[protocol.part_of(r, layout)] for r in range(layout.world)}
    for i in range(batch.num_seqs):
        ranks = [r for r, mine in holders.items() if i in mine]
        assert len(ranks) == layout.world // protocol.parts(layout)
        assert sum(r in protocol.answering(layout) for r in ranks) == 1
    answers = {protocol.part_of(r, layout): batch.take(holders[r]) for r in protocol.answering(layout)}
    merged = protocol.merge([answers[p] for p in range(len(parts))]).take(order(parts))
    assert torch.equal(merged.cu_seqlens, batch.cu_seqlens)
    assert all(torch.equal(merged[name], batch[name]) for name in batch.cols)


@given(layouts)
def test_who_holds_what_in_training(layout: Layout) -> None:
    """THREE_D: the part goes by the dp coordinate alone; the one who answers has the last layer and is first of tp."""
    for r in range(layout.world):
        assert d.THREE_D.part_of(r, layout) == layout.coord(r).dp
        assert d.DP.part_of(r, layout) == r and d.THREE_D_ALL_MICRO_DP.part_of(r, layout) == r
    assert [layout.coord(r) for r in d.THREE_D.answering(layout)] == [
        Coord(i, layout.pp - 1, 0) for i in range(layout.dp)
    ]
    assert [layout.coord(r) for r in d.THREE_D_PP_ONLY.answering(layout)] == [Coord(0, p, 0) for p in range(layout.pp)]


@given(layouts, st.sampled_from((d.ONE_TO_ALL, d.ALL_TO_ALL, d.RANK_ZERO, d.THREE_D_PP_ONLY)))
def test_whole_calls(layout: Layout, protocol: d.Dispatch) -> None:
    everyone = list(range(layout.world))
    assert protocol.running(layout) == ([0] if protocol is d.RANK_ZERO else everyone)
    assert protocol.parts(layout) == 1
    if protocol in (d.ONE_TO_ALL, d.ALL_TO_ALL):
        assert protocol.answering(layout) == everyone


@given(micro_dp())
def test_generation_groups(case: tuple[Layout, int, int]) -> None:
    """Every copy has pp x tp ranks of one training replica, in order of the shards they hold, and one rank answers."""
    layout, pp, tp = case
    protocol = d.three_d_all_micro_dp(pp, tp)
    groups: dict[int, list[Coord]] = {}
    for r in range(layout.world):
        groups.setdefault(protocol.part_of(r, layout), []).append(layout.coord(r))
    assert sorted(groups) == list(range(protocol.parts(layout)))
    for coords in groups.values():
        assert len(coords) == pp * tp and len({c.dp for c in coords}) == 1
        # The k-th shard of generation covers the training shards [k n/tp, (k+1) n/tp), and one of its ranks held one.
        assert sorted({c.tp * tp // layout.tp for c in coords}) == list(range(tp))
        assert sorted({c.pp * pp // layout.pp for c in coords}) == list(range(pp))
    assert sorted(protocol.part_of(r, layout) for r in protocol.answering(layout)) == sorted(groups)


def test_generation_that_does_not_divide_training() -> None:
    with pytest.raises(ValueError, match="tp=2 does not divide"):
        d.three_d_all_micro_dp(1, 2).parts(Layout(dp=1, pp=1, tp=3))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 6)), max_size=60), st.integers(1, 8), st.booleans())
def test_partition_is_whole_balanced_and_keeps_groups(rows, parts: int, together: bool) -> None:
    lengths, groups = [n for n, _ in rows], [g for _, g in rows]
    cut = partition(lengths, parts, groups if together else None)
    assert len(cut) == parts and sorted(i for part in cut for i in part) == list(range(len(rows)))
    assert all(part == sorted(part) for part in cut)
    units: dict[int, int] = {}
    for i, n in enumerate(lengths):
        key = groups[i] if together else i
        units[key] = units.get(key, 0) + n
    if together:
        assert all(len({p for p, part in enumerate(cut) if g in {groups[i] for i in part}}) == 1 for g in units)
    loads = [sum(lengths[i] for i in part) for part in cut]
    assert max(loads) <= sum(lengths) / parts + max(units.values(), default=0)


def test_partition_of_known_sizes() -> None:
    assert partition([5, 4, 3, 3], 2) == [[0, 3], [1, 2]]
    assert partition([1, 9, 1, 1], 2, [0, 1, 0, 0]) == [[1], [0, 2, 3]]
    assert partition([7], 3) == [[0], [], []]


@pytest.mark.parametrize("protocol", [*FIXED, d.three_d_all_micro_dp(2, 1)], ids=lambda p: p.name)
def test_protocols_can_be_sent(protocol: d.Dispatch) -> None:
    layout = Layout(dp=2, pp=2, tp=2)
    back = pickle.loads(pickle.dumps(protocol))
    assert back.answering(layout) == protocol.answering(layout) and back.parts(layout) == protocol.parts(layout)


def test_merging_values() -> None:
    one, two = Metrics().mean("loss", 2.0, 1.0), Metrics().mean("loss", 1.0, 3.0)
    assert d.DP.merge([one, two]).values_by_name() == {"loss": 0.75}
    assert d.RANK_ZERO.merge(["a"]) == "a" and d.ONE_TO_ALL.merge(["a", "b"]) == ["a", "b"]
    assert d.ONE_TO_ALL.merge([one, two])["loss"] == ("mean", 3.0, 4.0)


def test_columns_come_from_parts_only() -> None:
    with pytest.raises(AssertionError, match="one_to_all cannot write"):
        register(d.ONE_TO_ALL, reads=("token_ids",), writes=("values",))
