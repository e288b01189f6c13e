"""Engines of several ranks as one: the contract of submit, poll and abort, over stand-ins for ranks."""

from __future__ import annotations

from typing import Any

from verl.controller.group import Done
from verl.core.generation import Completion, GenRequest, SamplingParams
from verl.core.protocols import RolloutEngine
from verl.parallel.layout import Coord
from verl.weights.publisher import InProcessPublisher
from verl.workers.group_engine import GroupEngine


class Ranks:
    """A group whose ranks each finish one request a slice, in the order they got them."""

    def __init__(self, ranks: int):
        self.queues: list[list[GenRequest]] = [[] for _ in range(ranks)]
        self.calls: list[str] = []
        self.version = -1

    def call(self, method: str, batch: Any = None, **kwargs: Any) -> Done[Any]:
        self.calls.append(method)
        return Done(getattr(self, method)(**kwargs))

    def submit(self, requests: list[list[GenRequest]]) -> None:
        for queue, mine in zip(self.queues, requests, strict=True):
            queue += mine

    def advance(self, seconds: float) -> list[list[Completion]]:
        return [[done(queue.pop(0), "stop")] if queue else [] for queue in self.queues]

    def abort(self, request_ids: list[str]) -> list[list[Completion]]:
        out = [[done(r, "abort") for r in queue if r.id in request_ids] for queue in self.queues]
        self.queues = [[r for r in queue if r.id not in request_ids] for queue in self.queues]
        return out

    def publish(self, version: int) -> None:
        self.version = version


def done(request: GenRequest, finish: Any) -> Completion:
    return Completion(request.id, (1,), (0.0,), finish, (3,))


def places(replicas: int) -> list[Coord]:
    """Of as many replicas, of one rank each."""
    return [Coord(dp, 0, 0) for dp in range(replicas)]


def requests(groups: int, n: int) -> list[GenRequest]:
    return [
        GenRequest(f"{g}/{k}", str(g), (1, 2), SamplingParams(max_tokens=4)) for g in range(groups) for k in range(n)
    ]


def test_all_come_back_once() -> None:
    ranks = Ranks(2)
    engine: RolloutEngine = GroupEngine(ranks, places(2))
    engine.submit(requests(3, 2))
    assert [{r.group_id for r in queue} for queue in ranks.queues] == [{"0", "2"}, {"1"}], "groups stay together"
    seen = []
    for _ in range(10):
        seen += [c.request_id for c in engine.poll()]
    assert sorted(seen) == sorted(r.id for r in requests(3, 2))
    calls = len(ranks.calls)
    assert engine.poll() == [] and len(ranks.calls) == calls, "nothing is asked where nothing is pending"


def test_abort_returns_each_request_once() -> None:
    """Two slices are asked for ahead, so some are done before the ranks hear of the abort."""
    ranks = Ranks(2)
    engine = GroupEngine(ranks, places(2))
    asked = [r.id for r in requests(4, 2)]
    engine.submit(requests(4, 2))
    first = [c.request_id for c in engine.poll()]
    stopped = engine.abort([*asked[2:], "unknown"])
    rest = [c.request_id for _ in range(8) for c in engine.poll()]
    assert sorted([*first, *(c.request_id for c in stopped), *rest]) == sorted(asked)
    assert {c.request_id for c in stopped} == set(asked[2:]) - set(first)
    assert ranks.queues == [[], []]


def test_publishing_is_a_version() -> None:
    ranks = Ranks(1)
    engine = GroupEngine(ranks, places(1))
    InProcessPublisher(engine, dict).publish(7)
    assert ranks.version == 7 == engine.version
