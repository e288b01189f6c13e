"""The pure parts: who is prefilled next, and how prompts are packed into one forward."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.core import GenRequest, SamplingParams
from verl.engines.rollout.admission import Admission, Budget
from verl.engines.rollout.base import Limits
from verl.engines.rollout.cache import SlotCache
from verl.engines.rollout.prefill import plan_prefill
from verl.engines.rollout.scheduler import Waiting
from verl.engines.rollout.sequence import Sequence

LIMITS = Limits(vocab_size=100, max_model_len=64, eos_token_ids=(2, 5, 200))
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24).map(tuple)
BEGUN = st.builds(lambda head, rest: head + rest, st.sampled_from([(), (3,) * 9, (3,) * 12, (4,) * 10]), TOKENS)


def sequence(name: str, tokens: tuple[int, ...]) -> Sequence:
    return Sequence.of(GenRequest(name, "g", tokens, SamplingParams(stop_token_ids=(7, 5))), LIMITS)


def test_ends_are_the_models_and_the_requests() -> None:
    assert sequence("a", (1,)).ends == (2, 5, 7)


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 40))
def test_waiting_serves_everyone_once_within_the_limits(
    prompts: list[tuple[int, ...]], slots: int, budget: int
) -> None:
    waiting = Waiting()
    everyone = [sequence(str(i), p) for i, p in enumerate(prompts)]
    waiting.add(everyone)
    served: list[Sequence] = []
    computed = None
    while len(waiting):
        admission = Admission(Budget(slots, 1), [])
        units = waiting.take(admission, budget, lambda t: 0 if t == computed else len(t))  # noqa: B023
        members = [s for u in units for s in u.members]
        assert 0 < len(members) <= slots
        assert all(s.all_tokens == u.tokens for u in units for s in u.members)
        assert len(units) == 1 or sum(len(u.tokens) for u in units if u.tokens != computed) <= budget
        assert not any(u.more for u in units[:-1])
        computed = units[-1].tokens if units[-1].more else None
        served += members
    assert sorted(s.request.id for s in served) == sorted(s.request.id for s in everyone)
    firsts = [everyone.index(s) for s in served if s is next(e for e in everyone if e.all_tokens == s.all_tokens)]
    assert firsts == sorted(firsts), "first come, first served"


def test_waiting_puts_preempted_sequences_first_and_removes_by_id() -> None:
    waiting = Waiting()
    waiting.add([sequence("a", (1, 2)), sequence("b", (3,))])
    waiting.add_front([sequence("c", (4,)), sequence("d", (3,))])
    assert [s.request.id for s in waiting] == ["c", "d", "b", "a"]
    assert [s.request.id for s in waiting.remove({"d", "a", "z"})] == ["d", "a"]
    assert [s.request.id for s in waiting] == ["c", "b"] and (3,) in waiting and (1, 2) not in waiting


@settings(max_examples=300, deadline=None)
@given(
    st.lists(BEGUN, min_size=1, max_size=8, unique=True),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 0, 2])), min_size=8, max_size=8),
)
def test_prefill_plan_gives_every_prompt_its_own_tokens(
    prompts: list[tuple[int, ...]], sizes: list[tuple[int, int]]
) -> None:
    """Walk the plan as attention does: path of each last token, and what lands in each slot, must be the prompt.

    sizes: slots of each prompt, and how many of others lie behind them.
    """
    ends = list(accumulate((n for both in sizes[: len(prompts)] for n in both), initial=0))
    slots = [slice(a, b) for a, b in pairwise(ends)][::2]
    plan = plan_prefill(prompts, slots)
    assert sum(b.length for b in plan.blocks) == len(plan.token_ids) <= sum(map(len, prompts))
    cache: dict[tuple[int, int], int] = {}
    for w in plan.writes:
        for slot in range(w.slots.start, w.slots.stop):
            for i in range(w.stop - w.start):
                assert (slot, w.at + i) not in cache, "written once"
                cache[slot, w.at + i] = plan.token_ids[w.start + i]
                assert plan.positions[w.start + i] == w.at + i
    assert {slot for slot, _ in cache} == {slot for s in slots for slot in range(s.start, s.stop)}
    for prompt, where in zip(prompts, slots, strict=True):
        for slot in range(where.start, where.stop):
            assert tuple(cache[slot, i] for i in range(len(prompt))) == prompt
    assert [path(plan, at) for at in plan.last] == prompts


def path(plan: object, at: int) -> tuple[int, ...]:
    """Tokens that packed token `at` sees, by the meaning of a Block."""
    block = next(b for b in plan.blocks if b.start <= at < b.start + b.length)  # type: ignore[attr-defined]
    ids = plan.token_ids  # type: ignore[attr-defined]
    start = block.start + block.prompt
    if at < start:
        return tuple(ids[block.start : at + 1])
    for n in block.branches:
        if at < start + n:
            return tuple(ids[block.start : block.start + block.prompt]) + tuple(ids[start : at + 1])
        start += n
    raise AssertionError("not in the block")


def test_prefill_plan_shares_a_system_prompt_but_not_across_unlike_prompts() -> None:
    a, b = tuple(range(20)), tuple(range(50, 80))
    prompts = [(*a, 90), (*a, 91), (*b, 92), (*b, 93), (1, 2)]
    plan = plan_prefill(prompts, [slice(i, i + 1) for i in range(5)])
    assert [(x.prompt, x.branches) for x in plan.blocks] == [(20, (1, 1)), (30, (1, 1)), (2, ())]


@pytest.mark.parametrize("steps", [[(1, 3), (2, 3), (2, 70), (9, 100)], [(5, 64), (3, 130), (6, 20)]])
def test_cache_growth_keeps_what_was_written(steps: list[tuple[int, int]]) -> None:
    cache = SlotCache(2, 1, 4, budget=Budget(8, 1), dtype=torch.float32, device=torch.device("cpu"))
    used = (0, 0)
    written: dict[tuple[int, int], float] = {}
    for slots, tokens in steps:
        cache.reserve(slots, tokens, longest=200, used_slots=used[0], used_tokens=used[1])
        assert cache.slots >= slots and cache.tokens >= tokens
        used = (max(used[0], slots), max(used[1], tokens))
        for at, value in written.items():
            assert float(cache.values[1][at[0], 0, at[1], 0]) == value
        cache.values[1][slots - 1, :, tokens - 1] = float(slots * 1000 + tokens)
        written[slots - 1, tokens - 1] = float(slots * 1000 + tokens)
    cache.move([slots - 1], [0], tokens)
    assert torch.equal(cache.values[1][0, :, :tokens], cache.values[1][slots - 1, :, :tokens])
    cache.release()
    assert cache.num_bytes == 0
