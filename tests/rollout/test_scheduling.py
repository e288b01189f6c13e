"""KV budget and chunked prefill of the native engine: whatever they are, everything finishes with the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.helpers import batch_of
from tests.rollout import tiny
from tests.rollout.test_contract import PROMPTS, run, same
from verl.core import GenRequest, RolloutError, SamplingParams
from verl.engines import rollout
from verl.engines.rollout.native import NativeEngine
from verl.engines.rollout.uniform import uniforms
from verl.models.packed import PackedInput

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Keys and values of one token of the tiny models: 2 layers, 2 key heads of 8, fp32."""


def gb(tokens: int) -> float:
    return tokens * TOKEN_BYTES / 1e9


@functools.cache
def policy(folder: Path) -> Any:
    return rollout.load("native", folder, dtype="float32", device="cpu").policy


@pytest.fixture(params=["llama", "mistral"])
def make(request: pytest.FixtureRequest, folders: Callable[..., Path]) -> Callable[..., Any]:
    from verl.engines.rollout.native import NativeEngine

    return lambda **options: NativeEngine(policy(folders(request.param)), tiny.EOS, **options)


REQUEST = st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(0, 3), st.booleans())


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(REQUEST, min_size=1, max_size=9),
    budget=st.one_of(st.none(), st.integers(64, 400)),
    slots=st.integers(1, 9),
    prefill_tokens=st.sampled_from([1, 3, 7, 16, 4096]),
)
def test_everything_finishes_with_the_same_tokens(
    folders: Callable[..., Path],
    asked: list[tuple[int, int, int, bool]],
    budget: int | None,
    slots: int,
    prefill_tokens: int,
) -> None:
    """Against an engine without limits; the cache never holds more than the budget; ids alike share their prompt."""
    made = [
        GenRequest(
            str(i), "g", PROMPTS[p], SamplingParams(temperature=float(not g), max_tokens=n, min_tokens=n // 2, seed=s)
        )
        for i, (p, n, s, g) in enumerate(asked)
    ]
    model = policy(folders("mistral"))
    want = run(NativeEngine(model, tiny.EOS), made)
    limit = None if budget is None else gb(budget)
    engine = NativeEngine(model, tiny.EOS, max_sequences=slots, prefill_tokens=prefill_tokens, kv_cache_gb=limit)
    engine.submit(made)
    done = {}
    for _ in range(5000):
        done.update((c.request_id, c) for c in engine.poll())
        assert budget is None or engine.cache_bytes <= budget * TOKEN_BYTES
        assert engine.pending == len(made) - len(done)
        if not engine.pending:
            break
    assert set(done) == set(want), "nothing is lost and nothing waits for ever"
    for request in made:
        got, other = done[request.id], want[request.id]
        if got.token_ids == other.token_ids:
            same(got, other)
        else:
            assert drawn_at_a_border(model, request, got.token_ids, other.token_ids), request


def drawn_at_a_border(model: Any, request: GenRequest, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two completions part at neighbours in the law whose border is the number drawn, but for fp32 rounding."""
    k = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    ids = [*request.token_ids, *a[: k + 1]]
    packed = PackedInput.of(batch_of([ids], [[0] * (len(ids) - 1) + [1]], [0]), False)
    logits = model.all_logits(model.features(packed))[packed.pred[-1]].double()
    if k < request.params.min_tokens:
        logits[list(tiny.EOS)] = -torch.inf
    low, high = sorted((a[k], b[k]))
    border = logits.softmax(-1).cumsum(-1)
    u = float(uniforms([request.params.seed], [k])[0])
    return abs(float(border[low]) - u) < 5e-6 and float(border[high - 1] - border[low]) < 5e-6


def test_a_border_is_told_from_a_fault(folders: Callable[..., Path]) -> None:
    """Seed 0 draws token 25 within 7e-7 of the border of 44 and 45; anywhere else, other tokens are a fault."""
    model = policy(folders("mistral"))
    request = GenRequest("4", "g", PROMPTS[3], SamplingParams(max_tokens=34, min_tokens=17, seed=0))
    (done,) = run(NativeEngine(model, tiny.EOS), [request]).values()
    ids = done.token_ids
    assert ids[25] in (44, 45)
    assert drawn_at_a_border(model, request, ids, (*ids[:25], 89 - ids[25]))
    assert not drawn_at_a_border(model, request, ids, (*ids[:24], ids[24] + 1))
    assert not drawn_at_a_border(model, request, ids, (*ids[:25], 46))


def test_who_joins_is_counted_with_growth_to_come(make: Callable[..., Any]) -> None:
    params = SamplingParams(max_tokens=50, min_tokens=50, seed=3)
    asked = [GenRequest(f"r{i}", "g", PROMPTS[i % 3], params) for i in range(4)]
    want, engine = run(make(), asked), make(kv_cache_gb=gb(4 * 64 - 64))
    done = run(engine, asked)
    assert list(done) == ["r0", "r3", "r1", "r2"], "three at a time, those of one prompt together"
    assert engine.stats.preemptions == 0
    for name, c in done.items():
        same(c, want[name])


def test_preempted_sequences_go_on_where_they_were(folders: Callable[..., Path], tmp_path: Path) -> None:
    """Longer than what admission looks ahead, so that sequences must be sent back."""
    from tests.tiny import make_model

    folder = make_model(tmp_path, family="llama", seed=4)  # 256 positions
    load = functools.partial(rollout.load, "native", folder, dtype="float32", device="cpu")
    params = SamplingParams(max_tokens=150, min_tokens=150, seed=3)
    prompts = [[5 + i, 9, 30 + i] for i in range(4)]
    want, engine = load().generate(prompts, params), load()
    per_token = engine._budget.token_bytes
    engine = load(kv_cache_gb=400 * per_token / 1e9)
    for a, b in zip(engine.generate(prompts, params), want, strict=True):
        same(a, b)
    assert engine.stats.preemptions >= 2
    assert engine.stats.prefilled_tokens > sum(map(len, prompts))
    assert engine.cache_bytes <= 400 * per_token


def test_what_can_never_fit_is_refused(make: Callable[..., Any]) -> None:
    engine = make(kv_cache_gb=gb(32))
    fits = GenRequest("a", "g", PROMPTS[0], SamplingParams(max_tokens=23))
    large = GenRequest("b", "g", PROMPTS[0], SamplingParams(max_tokens=24))
    with pytest.raises(RolloutError, match=rf"'b'.*9 prompt tokens.*{gb(48)} GB.*rollout.kv_cache_gb"):
        engine.submit([fits, large])
    assert engine.pending == 0 and len(run(engine, [fits])) == 1
    with pytest.raises(RolloutError, match="kv_cache_gb=0"):
        make(kv_cache_gb=0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 19, 20])
def test_chunks_give_the_same_law(make: Callable[..., Any], chunk: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    for a, b in zip(
        make(prefill_tokens=chunk).generate(PROMPTS, params, n=2), make().generate(PROMPTS, params, n=2), strict=True
    ):
        same(a, b)


def test_decoding_goes_on_between_chunks(make: Callable[..., Any]) -> None:
    engine, sizes = make(prefill_tokens=5), []
    hook = engine.policy.decoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    try:
        params = SamplingParams(max_tokens=20, min_tokens=20)
        engine.submit([GenRequest("short", "g", PROMPTS[1], params)])
        engine.poll()
        engine.submit([GenRequest(f"long{i}", "g", PROMPTS[4], params) for i in range(2)])
        for _ in range(9):
            engine.poll()
    finally:
        hook.remove()
    assert sizes == [3, 1, 5, 1, 5, 1, 5, 1, 5, 3] or sizes == [3, 5, 1, 5, 1, 5, 1, 5, 3, 3]
    assert engine.stats.prefilled_tokens == 3 + 20


@pytest.mark.parametrize("polls", range(1, 10))
def test_abort_and_release_between_chunks(make: Callable[..., Any], polls: int) -> None:
    params = SamplingParams(max_tokens=6, min_tokens=6, seed=2)
    asked = [GenRequest(f"r{i}", "g", PROMPTS[(1, 4, 4, 3)[i]], params) for i in range(4)]
    want, engine = run(make(), asked), make(prefill_tokens=4)
    engine.submit(asked)
    done = {}
    for _ in range(polls):
        done.update((c.request_id, c) for c in engine.poll())
    gone = engine.abort(["r1"])
    assert len(gone) == ("r1" not in done) and engine.pending == 4 - len(done) - len(gone)
    if polls % 2:
        engine.place("released")
    while engine.pending:
        done.update((c.request_id, c) for c in engine.poll())
    assert set(done) | {"r1"} == set(want)
    for name, c in done.items():
        same(c, want[name])


def test_a_forward_in_chunks_writes_the_same_keys(make: Callable[..., Any]) -> None:
    whole, parts = make(), make(prefill_tokens=6)
    for engine in (whole, parts):
        engine.submit([GenRequest("a", "g", PROMPTS[4], SamplingParams(max_tokens=3, min_tokens=3))])
        for _ in range(1 if engine is whole else 4):
            engine.poll()
    for ours, theirs in ((whole._cache.keys, parts._cache.keys), (whole._cache.values, parts._cache.values)):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a[0, :, :20], b[0, :, :20], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["commit", "place", "abort"])
@pytest.mark.parametrize("polls", [1, 2, 3, 5])
def test_a_long_prompt_gets_done_however_often_it_is_disturbed(make: Callable[..., Any], how: str, polls: int) -> None:
    """By new weights, by a cache that is given back, by samples of its own prompt that come and are aborted."""
    params = SamplingParams(max_tokens=3, min_tokens=3, seed=2)
    asked = [GenRequest("long", "g", PROMPTS[4], params), GenRequest("short", "h", PROMPTS[1], params)]
    want, engine = run(make(), asked), make(prefill_tokens=2)
    engine.submit(asked)
    done: dict[str, Any] = {}
    for turn in range(60):
        guest = GenRequest(f"guest{turn}", "g", PROMPTS[4], params)
        if how == "abort" and "long" not in done:
            engine.submit([guest])
        for _ in range(polls):
            done.update((c.request_id, c) for c in engine.poll())
        if how == "commit":
            engine.commit(turn)
        elif how == "place":
            engine.place("released")
        else:
            engine.abort([guest.id])
        if {"long", "short"} <= set(done):
            break
    for request in asked:
        same(done[request.id], want[request.id])


def test_an_abort_keeps_what_the_others_of_a_prompt_have(make: Callable[..., Any]) -> None:
    """20 tokens by fives: computed once, whoever leaves on the way; when all have left, nothing is in the way."""
    params = SamplingParams(max_tokens=2, min_tokens=2, seed=2)
    asked = [GenRequest(f"r{i}", "g", PROMPTS[4], params) for i in range(3)]
    want, engine = run(make(), asked), make(prefill_tokens=5)
    engine.submit(asked)
    for name in ("r1", "r0"):
        engine.poll()
        assert [c.token_ids for c in engine.abort([name])] == [()]
    assert engine.pending == 1
    done = {}
    while engine.pending:
        done.update((c.request_id, c) for c in engine.poll())
    same(done["r2"], want["r2"])
    assert engine.stats.prefilled_tokens == 20
    engine.submit(asked[:1])
    engine.poll()
    assert len(engine.abort(["r0"])) == 1 and engine.pending == 0 and engine.poll() == []


def test_chunks_grow_with_setbacks_only(make: Callable[..., Any]) -> None:
    engine, sizes = make(prefill_tokens=4), []
    hook = engine.policy.decoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    try:
        engine.submit([GenRequest("long", "g", PROMPTS[4], SamplingParams(max_tokens=1))])
        for version in range(4):
            engine.poll()
            engine.commit(version)
    finally:
        hook.remove()
    assert sizes == [4, 8, 16, 20] and engine.pending == 0
