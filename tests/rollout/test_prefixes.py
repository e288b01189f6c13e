"""The prefix cache: what is kept and what goes (pure), and that an engine with it says the same with less work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout import tiny
from tests.rollout.test_contract import drain, run, same
from tests.rollout.test_scheduling import TOKEN_BYTES, policy
from verl.core import Completion, ConfigError, GenRequest, RolloutError, SamplingParams
from verl.engines import rollout
from verl.engines.rollout.native import NativeEngine
from verl.engines.rollout.prefixes import BLOCK, Prefixes, Tokens

PLENTY = 1e-2
TURN: Tokens = (1, 7, 9, 11, 30, 22, 17, 8, 9, 40, 41)
NEXT: Tokens = (33, 34, 35, 36, 37)


class Naive:
    """The same by the meaning of the words: whole beginnings, each with the time of its last use."""

    def __init__(self, capacity: int):
        self.capacity, self.now = capacity, 0
        self.used: dict[Tokens, int] = {}

    def find(self, tokens: Tokens) -> int:
        kept = [b for b in beginnings(tokens) if b in self.used]
        self._use(kept)
        return len(kept)

    def add(self, tokens: Tokens) -> None:
        mine = beginnings(tokens)[: self.capacity]
        self._use(mine)
        while len(self.used) > self.capacity:
            # Of those used at one time the longest goes.
            del self.used[min(self.used, key=lambda b: (self.used[b], -len(b)))]

    def _use(self, kept: list[Tokens]) -> None:
        self.now += 1
        self.used.update((b, self.now) for b in kept)


def beginnings(tokens: Tokens) -> list[Tokens]:
    return [tokens[:n] for n in range(BLOCK, len(tokens) + 1, BLOCK)]


WORDS = st.lists(st.integers(0, 2), max_size=6)
"""Kinds of blocks; few, so that much is in common."""


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), WORDS, st.integers(0, BLOCK - 1)), max_size=25), st.integers(0, 9))
def test_the_longest_beginnings_within_the_budget(steps: list[tuple[bool, list[int], int]], capacity: int) -> None:
    prefixes, naive = Prefixes(capacity), Naive(capacity)
    store: dict[int, Tokens] = {}
    for adds, words, rest in steps:
        tokens = (*(w for w in words for _ in range(BLOCK)), *[1] * rest)
        if adds:
            naive.add(tokens)
            first, places = prefixes.add(tokens)
            store.update(zip(places, beginnings(tokens)[first:], strict=False))
            assert len(set(places)) == len(places) and all(0 <= p < capacity for p in places)
        else:
            found = prefixes.find(tokens)
            assert [store[p] for p in found] == beginnings(tokens)[: len(found)], "each place holds what it is said to"
            assert len(found) == naive.find(tokens)
        assert len(prefixes) == len(naive.used) <= capacity
    for kept in list(naive.used):
        assert [store[p] for p in prefixes.find(kept)] == beginnings(kept)
    prefixes.clear()
    assert len(prefixes) == 0 and not any(prefixes.find(kept) for kept in naive.used)


def test_the_one_used_longest_ago_goes() -> None:
    a, b, c = ((kind,) * 2 * BLOCK for kind in (1, 2, 3))
    prefixes = Prefixes(5)
    prefixes.add(a)
    prefixes.add(b)
    assert len(prefixes.find(a)) == 2
    assert prefixes.add(c) == (0, [4, 3]), "the free place, then the place of the end of b"
    assert [len(prefixes.find(x)) for x in (a, b, c)] == [2, 1, 2]


@pytest.fixture(params=["llama", "mistral"])
def make(request: pytest.FixtureRequest, folders: Callable[..., Path]) -> Callable[..., Any]:
    """Engines, each on a model of its own, as tests change the weights. prefix_cache_gb is 0 unless it is given."""
    return lambda **options: rollout.load("native", folders(request.param), dtype="float32", device="cpu", **options)


def turns(engine: Any, params: SamplingParams, n: int = 2) -> list[list[Completion]]:
    """Three turns of a conversation of n samples, then the first prompt again."""
    texts: list[Tokens] = [TURN] * n
    said = []
    for _ in range(3):
        asked = [GenRequest(f"r{i}", "g", t, params) for i, t in enumerate(texts)]
        done = run(engine, asked)
        said.append([done[r.id] for r in asked])
        texts = [(*t, *done[r.id].token_ids, *NEXT) for t, r in zip(texts, asked, strict=True)]
    return [*said, engine.generate([TURN], params, n=n)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "options", [{}, {"prefill_tokens": 5}, {"max_sequences": 1}, {"prefix_cache_gb": 2e-5}], ids=str
)
def test_the_same_tokens_with_and_without(
    make: Callable[..., Any], temperature: float, options: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=8, min_tokens=7, seed=4)
    engine, plain = make(**{"prefix_cache_gb": PLENTY, **options}), make()
    for turn, want in zip(turns(engine, params), turns(plain, params), strict=True):
        for a, b in zip(turn, want, strict=True):
            same(a, b)
    assert engine.stats.reused_tokens > 0 and plain.stats.reused_tokens == 0
    assert plain.prefix_bytes == 0 < engine.prefix_bytes <= round(1e9 * options.get("prefix_cache_gb", PLENTY))


def test_a_second_turn_computes_what_is_new(make: Callable[..., Any]) -> None:
    engine = make(prefix_cache_gb=PLENTY)
    params = SamplingParams(max_tokens=6, min_tokens=6, seed=2)
    (first,) = engine.generate([TURN], params)
    # 11 + 6 tokens, of which the last has no keys: two whole blocks.
    assert engine.stats.prefilled_tokens == 11
    second = (*TURN, *first.token_ids, *NEXT, 50, 51)
    assert len(second) == 3 * BLOCK
    engine.generate([second], params, n=4)
    assert engine.stats.reused_tokens == 16, "once for the four"
    assert engine.stats.prefilled_tokens == 11 + len(second) - 16
    engine.generate([second], params)
    assert engine.stats.reused_tokens == 16 + 16, "a prompt's own last token is always computed"


def test_a_beginning_that_parts_is_used_as_far_as_it_goes(make: Callable[..., Any]) -> None:
    engine, params = make(prefix_cache_gb=PLENTY), SamplingParams(max_tokens=4, min_tokens=4, seed=2)
    engine.generate([tuple(range(10, 40))], params)
    prompts = [(*range(10, 28), 7, 7, 8), (*range(10, 20), 50, 51, 52), (1, 44, 6), (*range(10, 28), 7, 7, 9)]
    for a, b in zip(engine.generate(prompts, params, n=2), make().generate(prompts, params, n=2), strict=True):
        same(a, b)
    assert engine.stats.reused_tokens == 16 + 8 + 0 + 16


def test_those_that_begin_between_those_that_do_not(make: Callable[..., Any]) -> None:
    """Neighbours in the forward, though not in the slots: what the outer two share must not land in the middle one."""
    params = SamplingParams(max_tokens=4, min_tokens=4, seed=2)
    middle = (*range(30, 38), 9, 9, 9)
    prompts = [(*range(10, 20), 40), (*middle, 41), (*range(10, 20), 42)]
    engine = make(prefix_cache_gb=PLENTY)
    engine.generate([middle], params)
    for a, b in zip(engine.generate(prompts, params), make().generate(prompts, params), strict=True):
        same(a, b)
    assert engine.stats.reused_tokens == 8


def test_a_commit_forgets(make: Callable[..., Any]) -> None:
    engine, fresh = make(prefix_cache_gb=PLENTY), make()
    params = SamplingParams(temperature=0.7, max_tokens=6, min_tokens=6, seed=2)
    (first,) = engine.generate([TURN], params)
    for changed in (engine.policy, fresh.policy):
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in changed.parameters():
                p.add_(torch.randn(p.shape, generator=noise) * 0.1)
    engine.commit(1)
    second = (*TURN, *first.token_ids, *NEXT)
    for a, b in zip(engine.generate([second], params), fresh.generate([second], params), strict=True):
        same(a, b)
    assert engine.stats.reused_tokens == 0 and engine.stats.prefilled_tokens == 11 + len(second)


@pytest.mark.parametrize("how", ["released", "host", "error"])
def test_what_is_released_is_forgotten(make: Callable[..., Any], how: Any) -> None:
    engine, params = make(prefix_cache_gb=PLENTY), SamplingParams(max_tokens=6, min_tokens=6)
    engine.generate([TURN], params)
    assert engine.prefix_bytes > 0
    if how == "error":
        hook = engine.policy.decoder.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([TURN], params)
        hook.remove()
    else:
        engine.place(how)
    assert engine.prefix_bytes == 0
    before = engine.stats.reused_tokens
    engine.generate([TURN], params)
    assert engine.stats.reused_tokens == before


def test_an_abort_keeps_what_others_left(make: Callable[..., Any]) -> None:
    engine, params = make(prefix_cache_gb=PLENTY), SamplingParams(max_tokens=6, min_tokens=6)
    engine.generate([TURN], params)
    engine.submit([GenRequest("a", "g", NEXT, params)])
    engine.poll()
    engine.abort(["a"])
    engine.generate([TURN], params)
    assert engine.stats.reused_tokens == 8


def test_a_long_continuation_goes_in_chunks(make: Callable[..., Any]) -> None:
    """More new tokens than a prefill step takes, in turns with a sequence that decodes and finishes meanwhile."""
    engine, sizes = make(prefix_cache_gb=PLENTY, prefill_tokens=6), []
    params = SamplingParams(temperature=0.8, max_tokens=7, min_tokens=7, seed=3)
    (first,) = engine.generate([TURN], params)
    second = (*TURN, *first.token_ids, *NEXT, *NEXT, *NEXT)
    asked = [GenRequest("other", "g", NEXT, params), *(GenRequest(f"r{i}", "g", second, params) for i in range(2))]
    want = run(make(), asked)
    engine.policy.decoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    engine.submit(asked[:1])
    engine.poll()
    engine.submit(asked[1:])
    done = drain(engine, 3)
    for name, c in done.items():
        same(c, want[name])
    assert engine.stats.reused_tokens == 16
    assert [n for n in sizes if n > 3] == [5, 6, 6, 5], "33 tokens less 16"


def test_the_budget_is_checked(make: Callable[..., Any]) -> None:
    least = BLOCK * TOKEN_BYTES / 1e9
    with pytest.raises(RolloutError, match=r"rollout\.prefix_cache_gb=-1\.0 must be 0 or more"):
        make(prefix_cache_gb=-1.0)
    with pytest.raises(ConfigError, match=rf"^rollout\.prefix_cache_gb: {least * 0.99} .*{least} or more"):
        make(prefix_cache_gb=least * 0.99)
    engine = make(prefix_cache_gb=least)
    engine.generate([tuple(range(10, 40))], SamplingParams(max_tokens=3))
    assert engine.prefix_bytes == BLOCK * TOKEN_BYTES


EPISODE = st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 3), st.booleans())


@settings(max_examples=25, deadline=None)
@given(
    rounds=st.lists(st.lists(EPISODE, min_size=1, max_size=5), min_size=1, max_size=4),
    blocks=st.integers(1, 12),
    slots=st.integers(1, 5),
    prefill_tokens=st.sampled_from([1, 3, 7, 16, 4096]),
)
def test_whatever_is_asked_the_tokens_are_the_same(
    folders: Callable[..., Path],
    rounds: list[list[tuple[int, int, int, bool]]],
    blocks: int,
    slots: int,
    prefill_tokens: int,
) -> None:
    """Rounds of requests that go on from what was said before, from a cache that is too small for most of it."""
    model, gb = policy(folders("mistral")), blocks * BLOCK * TOKEN_BYTES / 1e9
    plain = NativeEngine(model, tiny.EOS)
    engine = NativeEngine(
        model, tiny.EOS, max_sequences=slots, prefill_tokens=prefill_tokens, prefix_cache_gb=gb * 1.001
    )
    texts: list[Tokens] = [TURN, (*TURN[:9], 3), NEXT, (1,)]
    for asks in rounds:
        asked = [
            GenRequest(
                str(i), "g", texts[t % len(texts)][:45], SamplingParams(temperature=float(not g), max_tokens=n, seed=s)
            )
            for i, (t, n, s, g) in enumerate(asks)
        ]
        done, want = run(engine, asked), run(plain, asked)
        for r in asked:
            same(done[r.id], want[r.id])
            texts.insert(0, (*r.token_ids, *done[r.id].token_ids, *NEXT[:2]))
        assert engine.prefix_bytes <= blocks * BLOCK * TOKEN_BYTES
