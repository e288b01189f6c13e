"""Which prompts a step samples: the sampler's, others for retired ones, and further ones for a refill."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.config import RunConfig
from verl.core import Completion, Prompt
from verl.data import PromptSampler
from verl.trainer.source import Group, OnDemandSource
from verl.workers.rollout import RolloutWorker


class Echo:
    """An engine that answers each request at once, with one token, in another order than asked."""

    version = 0

    def __init__(self):
        self.requests = []
        self.submits = 0

    def submit(self, requests):
        self.submits += 1
        self.requests += requests
        self.open = list(requests)

    def counts(self):
        return {}

    def poll(self):
        done, self.open = self.open, []
        return [Completion(r.id, (7,), (-1.0,), "stop", (0,)) for r in reversed(done)]


def source(count: int = 20, per_step: int = 4, n: int = 3, greedy: bool = False, shuffle: bool = True):
    cfg = RunConfig().model_copy(update={"rollout": RunConfig().rollout.model_copy(update={"n": n})})
    prompts = [Prompt(str(i), (1, i + 2), f"p{i}") for i in range(count)]
    worker = RolloutWorker(Echo(), SimpleNamespace(decode=lambda ids, **k: "x"), seed=3)
    return OnDemandSource(prompts, PromptSampler(count, per_step, 3, shuffle), worker, cfg, greedy)


def drawn(source: OnDemandSource, step: int, prompts: list[int], first_group: int = 0) -> list[Group]:
    """Groups in order of place, whatever order they were done in."""
    done = [pair for some in source.sample(step, prompts, first_group) for pair in some.items()]
    return [group for _, group in sorted(done)]


def test_samples_come_by_group_with_unique_numbers_and_seeds() -> None:
    s = source()
    first, second = drawn(s, 1, [3, 5]), drawn(s, 1, [7], first_group=2)
    assert [g.index for g in first + second] == [3, 5, 7] and all(g.greedy is None for g in first)
    flat = [t for g in first + second for t in g.samples]
    assert [t.group_id for t in flat] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [t.sample_id for t in flat] == [0, 1, 2] * 3
    assert [t.prompt.id for t in flat] == ["3"] * 3 + ["5"] * 3 + ["7"] * 3
    requests = s.worker.engine.requests
    assert len({r.params.seed for r in requests}) == len({r.id for r in requests}) == 9
    again = source()
    drawn(again, 2, [3])
    assert not {r.params.seed for r in again.worker.engine.requests} & {r.params.seed for r in requests}


def test_the_greedy_response_is_asked_for_with_the_samples_and_kept_apart() -> None:
    plain, s = source(), source(greedy=True)
    groups = drawn(s, 1, [3, 5])
    engine = s.worker.engine
    assert engine.submits == 1
    assert [r.params.temperature for r in engine.requests] == [1.0, 1.0, 1.0, 0.0] * 2
    assert len({r.params.max_tokens for r in engine.requests}) == 1
    assert [r.group_id for r in engine.requests] == ["rollout/1/0"] * 4 + ["rollout/1/1"] * 4
    assert [len(g.samples) for g in groups] == [3, 3] and [g.greedy.sample_id for g in groups] == [3, 3]
    drawn(plain, 1, [3, 5])
    sampled = [r.params for r in engine.requests if r.params.temperature > 0]
    assert sampled == [r.params for r in plain.worker.engine.requests], "the greedy response changes no sample"


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.sets(st.integers(0, 19)))
def test_refill_is_a_pure_function_without_repetition(step: int, turn: int, count: int, taken: set[int]) -> None:
    got = source().more(step, turn, count, taken)
    assert got == source().more(step, turn, count, list(taken))
    assert len(got) == len(set(got)) == min(count, 20 - len(taken)) and not set(got) & taken


def test_refills_differ_between_steps_and_rounds() -> None:
    s = source()
    orders = [tuple(s.more(step, turn, 20, ())) for step in (1, 2) for turn in (1, 2)]
    assert len(set(orders)) == 4 and all(sorted(o) == list(range(20)) for o in orders)


@pytest.mark.parametrize("shuffle", [True, False])
def test_retired_prompts_are_replaced_while_the_others_fill_a_step(shuffle: bool) -> None:
    s = source(count=9, per_step=4, shuffle=shuffle)
    plain = [s.planned(step) for step in (1, 2, 3, 4)]
    s.retired = {plain[0][1], plain[1][2]}
    for step, was in enumerate(plain, start=1):
        now = s.planned(step)
        stay = [i for i in was if i not in s.retired]
        assert now[: len(stay)] == stay and len(now) == len(set(now)) == 4 and not set(now) & s.retired
        assert not set(s.more(step, 1, 9, now)) & s.retired
    s.retired = set(range(5))
    assert all(set(s.planned(step)) == {5, 6, 7, 8} for step in (1, 2, 3))
    s.retired = set(range(6))
    assert [s.planned(step) for step in (1, 2, 3, 4)] == plain
    assert sorted(s.more(1, 1, 9, [])) == list(range(9))


def test_what_is_retired_is_the_state() -> None:
    s, other = source(), source()
    s.retired = {7, 2}
    other.load_state_dict(s.state_dict())
    assert other.retired == {2, 7} and s.state_dict() == {"retired": [2, 7]}
