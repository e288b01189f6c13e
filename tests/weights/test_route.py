"""Rounds: every rank's sends are the others' receives, no round exceeds a bucket, no order of ranks blocks."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.cases import Case, cases
from tests.weights.parameters import even
from verl.core.errors import WeightsError
from verl.parallel.layout import Layout
from verl.weights.boxes import extents, numel
from verl.weights.groups import generation_coords
from verl.weights.plan import Shard, plan
from verl.weights.route import Route
from verl.weights.shards import shards

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def routes_of(case: Case, bucket: int) -> list[Route]:
    dtypes = {p.name: DTYPES[i % len(DTYPES)] for i, p in enumerate(case.parameters)}
    src, dst = case.src, case.dst
    transfers = plan(src, dst)
    return [Route.of(rank, transfers, src, dst, dtypes, bucket) for rank in range(case.train.world)]


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(8, 400))
def test_rounds_meet_and_stay_within_a_bucket(case: Case, bucket: int):
    routes = routes_of(case, bucket)
    sent, arrived = [], []
    for route in routes:
        for step in route.rounds:
            for messages, log in ((step.sends, sent), (step.receives, arrived)):
                assert sum(m.nbytes for m in messages) <= bucket
                peers = [m.peer for m in messages]
                assert peers == sorted(set(peers)) and route.rank not in peers
                for m in messages:
                    pair = (route.rank, m.peer) if log is sent else (m.peer, route.rank)
                    assert m.nbytes == sum(route.nbytes(p.name, p.box) for p in m.pieces)
                    log.append((*pair, m.pieces))
    # The k-th message between two ranks is the same on both sides; each rank numbers only rounds that it is in.
    by_pair = [{}, {}]
    for log, pairs in zip((sent, arrived), by_pair, strict=True):
        for src, dst, parts in log:
            pairs.setdefault((src, dst), []).append(parts)
    assert by_pair[0] == by_pair[1]


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(8, 400))
def test_all_ranks_come_to_the_end_though_every_wait_blocks(case: Case, bucket: int):
    """A rank leaves a round when all of its peers have posted the other halves of its messages."""
    routes = routes_of(case, bucket)
    at, posted = [0] * len(routes), Counter()

    def post(route):
        if at[route.rank] < len(route.rounds):
            step = route.rounds[at[route.rank]]
            posted.update(("send", route.rank, m.peer) for m in step.sends)
            posted.update(("receive", m.peer, route.rank) for m in step.receives)

    def may_leave(route, left):
        step = route.rounds[at[route.rank]]
        return all(posted["receive", route.rank, m.peer] > left["out", route.rank, m.peer] for m in step.sends) and all(
            posted["send", m.peer, route.rank] > left["in", m.peer, route.rank] for m in step.receives
        )

    left = Counter()
    for route in routes:
        post(route)
    moved = True
    while moved:
        moved = False
        for route in routes:
            if at[route.rank] < len(route.rounds) and may_leave(route, left):
                step = route.rounds[at[route.rank]]
                left.update(("out", route.rank, m.peer) for m in step.sends)
                left.update(("in", m.peer, route.rank) for m in step.receives)
                at[route.rank] += 1
                post(route)
                moved = True
    assert at == [len(route.rounds) for route in routes]


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(8, 400))
def test_messages_and_kept_boxes_are_all_of_a_shard(case: Case, bucket: int):
    for route in routes_of(case, bucket):
        elements = Counter({name: numel(box) for name, box in route.kept.items()})
        for step in route.rounds:
            for message in step.receives:
                for piece in message.pieces:
                    elements[piece.name] += numel(piece.box)
                starts = [
                    sum(route.nbytes(p.name, p.box) for p in message.pieces[:k]) for k in range(len(message.pieces))
                ]
                sizes = [route.dtypes[p.name].itemsize for p in message.pieces]
                assert all(start % size == 0 for start, size in zip(starts, sizes, strict=True)), "aligned"
        assert elements == {name: numel(box) for name, box in route.wants.items()}


def test_pipeline_stages_send_at_the_same_time():
    """Two stages to one: each rank gets half of the model from the other, in as few rounds as its bytes need."""
    parameters, train = even(8), Layout(pp=2, tp=2)
    generation = Layout(dp=2, tp=2)
    src = shards(parameters, train)
    dst = shards(parameters, generation, generation_coords(train, generation, "strided"))
    dtypes = {p.name: torch.float32 for p in parameters}
    one = 4 * 64 * 16 // 2  # bytes of a tensor-parallel part of one parameter
    for rank in range(4):
        route = Route.of(rank, plan(src, dst), src, dst, dtypes, bucket_bytes=one)
        assert len(route.rounds) == 8  # eight parameters of the other stage, one a round
        assert all(len(step.sends) == len(step.receives) == 1 for step in route.rounds)


def test_a_route_checks_what_it_is_given():
    src, dst = [Shard(0, "w", ((0, 4),))], [Shard(1, "w", ((0, 4),))]
    transfers, dtypes = plan(src, dst), {"w": torch.float32}
    route = Route.of(0, transfers, src, dst, dtypes)
    route.check({"w": torch.zeros(4)})
    with pytest.raises(WeightsError, match=r"w: rank 0 should hold \(4,\) of it"):
        route.check({})
    with pytest.raises(WeightsError, match=r"w: rank 0 has \(3,\) in torch.float32; the layout says \(4,\)"):
        route.check({"w": torch.zeros(3)})
    with pytest.raises(WeightsError, match=r"in torch.float64; the layout says \(4,\) in torch.float32"):
        route.check({"w": torch.zeros(4, dtype=torch.float64)})
    with pytest.raises(WeightsError, match="w: no dtype"):
        Route.of(0, transfers, src, dst, {})
    with pytest.raises(WeightsError, match="bucket of 4 bytes"):
        Route.of(0, transfers, src, dst, dtypes, bucket_bytes=4)
    assert extents(route.holds["w"]) == (4,) and not route.wants
