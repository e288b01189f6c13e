"""The contract of a RolloutEngine, for every backend alike. A backend that fails here does not land."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout import tiny
from verl.core import Completion, GenRequest, RolloutError, SamplingParams
from verl.core.protocols import RolloutEngine

Make = Callable[..., Any]
PROMPTS: list[tuple[int, ...]] = [
    (1, 7, 9, 11, 30, 22, 17, 8, 9),
    (1, 44, 6),
    (1,),
    (1, 7, 9, 11, 30, 22, 17, 8, 9, 40, 41, 42, 43),
    (1, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30),
]


def requests(params: SamplingParams, prompts: list[tuple[int, ...]] = PROMPTS) -> list[GenRequest]:
    return [GenRequest(f"r{i}", f"g{i}", p, replace(params, seed=params.seed + i)) for i, p in enumerate(prompts)]


def drain(engine: Any, count: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    for _ in range(1000):
        done.update((c.request_id, c) for c in engine.poll())
        if len(done) == count:
            return done
    raise AssertionError(f"{len(done)} of {count} finished")


def run(engine: Any, asked: list[GenRequest]) -> dict[str, Completion]:
    engine.submit(asked)
    return drain(engine, len(asked))


def same(a: Completion, b: Completion) -> None:
    assert a.token_ids == b.token_ids and a.finish == b.finish
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_is_the_protocol(make: Make) -> None:
    engine = make()
    assert isinstance(engine, RolloutEngine)
    assert engine.poll() == [] and engine.version == 0


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_greedy_is_transformers_greedy(make: Make, reference: Any, family: str) -> None:
    """Which is also: cached decode = full forward, over prompts of unequal length and sliding windows."""
    done = make(family).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    for prompt, c in zip(PROMPTS, done, strict=True):
        assert c.token_ids == tiny.greedy(reference(family), prompt, 20)
        want = tiny.laws(reference(family), prompt, c.token_ids, 1.0)
        np.testing.assert_allclose(c.logprobs, want[range(len(c.token_ids)), list(c.token_ids)], atol=1e-4)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_logprobs_are_those_of_a_full_forward(make: Make, reference: Any, family: str) -> None:
    done = make(family).generate(PROMPTS, SamplingParams(temperature=0.6, max_tokens=20, seed=5), n=3)
    for i, c in enumerate(done):
        law = tiny.laws(reference(family), PROMPTS[i // 3], c.token_ids, 0.6)
        np.testing.assert_allclose(c.logprobs, law[range(len(c.token_ids)), list(c.token_ids)], atol=1e-4)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 12, "top_p": 0.8, "min_tokens": 6}], ids=str)
def test_truncated_laws_are_renormalised(make: Make, reference: Any, cut: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.3, max_tokens=12, seed=2, **cut)
    for i, c in enumerate(make().generate(PROMPTS, params, n=2)):
        laws = tiny.laws(reference(), PROMPTS[i // 2], c.token_ids, 1.3).double().exp().numpy()
        for at, (token, logprob, law) in enumerate(zip(c.token_ids, c.logprobs, laws, strict=True)):
            if at < params.min_tokens:
                law[list(tiny.EOS)] = 0
            order = np.argsort(-law, kind="stable")[: params.top_k or None]
            before = np.cumsum(law[order]) - law[order]
            kept = order[before < params.top_p * law[order].sum()] if params.top_p < 1 else order
            assert token in kept
            assert logprob == pytest.approx(np.log(law[token] / law[kept].sum()), abs=1e-4)


def test_first_tokens_follow_the_law(make: Make, reference: Any) -> None:
    prompt, n = PROMPTS[1], 2000
    counts = Counter(c.token_ids[0] for c in make().generate([prompt], SamplingParams(max_tokens=1, seed=11), n=n))
    want = torch.softmax(tiny.logits(reference(), prompt)[-1].double(), -1).numpy() * n
    got = np.array([counts[t] for t in range(tiny.VOCAB)])
    rare = want < 5
    observed = np.append(got[~rare], got[rare].sum())
    expected = np.append(want[~rare], want[rare].sum())
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    assert chi2 < len(expected) + 5 * np.sqrt(2 * len(expected))


def test_lengths_and_finish_reasons(make: Make) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=15, seed=3)
    done = make().generate(PROMPTS, params, n=20)
    assert [c.request_id for c in done] == [f"{i}/{j}" for i in range(len(PROMPTS)) for j in range(20)]
    assert {c.finish for c in done} == {"stop", "length"}
    for c in done:
        ends = [t in tiny.EOS for t in c.token_ids]
        assert not any(ends[:-1])
        assert c.finish == ("stop" if ends[-1] else "length")
        assert len(c.token_ids) <= 15 and (c.finish == "stop" or len(c.token_ids) == 15)
        assert len(c.logprobs) == len(c.versions) == len(c.token_ids)
    assert {c.token_ids[-1] for c in done if c.finish == "stop"} == set(tiny.EOS), "each end token of the list ends"


def test_min_tokens_bans_every_end_token_until_then(make: Make) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=15, min_tokens=7, stop_token_ids=(30, 31), seed=3)
    done = make().generate(PROMPTS, params, n=10)
    assert all(len(c.token_ids) >= 7 for c in done)
    assert not {t for c in done for t in c.token_ids[:7]} & {*tiny.EOS, 30, 31}
    assert any(c.finish == "stop" and len(c.token_ids) > 7 for c in done)


def test_stop_token_ids_end_and_are_kept(make: Make) -> None:
    free = make().generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8))[0]
    stop = free.token_ids[3]
    cut = make().generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,)))[0]
    first = free.token_ids.index(stop)
    assert cut.token_ids == free.token_ids[: first + 1] and cut.finish == "stop"


def test_a_request_is_the_same_alone_and_in_any_company(make: Make) -> None:
    asked = requests(SamplingParams(temperature=1.1, max_tokens=14, seed=100))
    asked += [
        GenRequest("greedy", "g", PROMPTS[1], SamplingParams(temperature=0, max_tokens=9)),
        GenRequest("cut", "g", PROMPTS[1], SamplingParams(top_k=4, top_p=0.9, max_tokens=5, seed=8)),
    ]
    together = run(make(), asked)
    backwards = run(make(max_sequences=3), asked[::-1])
    for request in asked:
        alone = run(make(), [request])[request.id]
        same(alone, together[request.id])
        same(alone, backwards[request.id])


def test_generate_depends_on_the_seed_and_on_nothing_else(make: Make) -> None:
    params = SamplingParams(max_tokens=12, seed=4)
    engine = make()
    first, again = engine.generate(PROMPTS, params, n=4), engine.generate(PROMPTS[::-1], params, n=4)
    for i in range(len(PROMPTS)):
        for j in range(4):
            same(first[i * 4 + j], again[(len(PROMPTS) - 1 - i) * 4 + j])
    other = engine.generate(PROMPTS, replace(params, seed=5), n=4)
    assert [c.token_ids for c in first] != [c.token_ids for c in other]
    for i in range(len(PROMPTS)):
        assert len({c.token_ids for c in first[i * 4 : i * 4 + 4]}) > 1, "samples of a prompt differ"


def test_one_sample_uses_the_seed_as_given(make: Make) -> None:
    params = SamplingParams(max_tokens=12, seed=77)
    engine = make()
    alone = run(engine, [GenRequest("x", "x", PROMPTS[0], params)])["x"]
    same(engine.generate([PROMPTS[0]], params)[0], alone)


@pytest.mark.parametrize("slots", [1, 3])
def test_more_requests_than_slots_lose_none(make: Make, slots: int) -> None:
    params = SamplingParams(max_tokens=10, seed=1)
    few, many = make(max_sequences=slots).generate(PROMPTS, params, n=5), make().generate(PROMPTS, params, n=5)
    for a, b in zip(few, many, strict=True):
        same(a, b)


def test_requests_may_join_while_others_decode(make: Make) -> None:
    asked = requests(SamplingParams(temperature=0.9, max_tokens=16, min_tokens=4, seed=6))
    want, engine, done = run(make(), asked), make(), {}
    for request in asked:
        engine.submit([request])
        done.update((c.request_id, c) for c in engine.poll())
    done.update(drain(engine, len(asked) - len(done)))
    for request in asked:
        same(done[request.id], want[request.id])


@pytest.mark.parametrize("polls", range(8))
def test_abort_at_every_position(make: Make, polls: int) -> None:
    """What comes back is the beginning of what would have been drawn; the others go on; ids can be reused."""
    asked = requests(SamplingParams(temperature=0.8, max_tokens=7, min_tokens=7, seed=9))
    want, engine = run(make(), asked), make(max_sequences=3)
    engine.submit(asked)
    done: dict[str, Completion] = {}
    for _ in range(polls):
        done.update((c.request_id, c) for c in engine.poll())
    victims = [asked[0].id, asked[3].id]
    aborted = {c.request_id: c for c in engine.abort([*victims, "not here"])}
    assert set(aborted) == set(victims) - set(done)
    for name, c in aborted.items():
        assert c.finish == "abort"
        n = len(c.token_ids)
        assert c.token_ids == want[name].token_ids[:n]
        np.testing.assert_allclose(c.logprobs, want[name].logprobs[:n], atol=2e-5)
    rest = len(asked) - len(aborted) - len(done)
    done.update(drain(engine, rest) if rest else {})
    again = run(engine, [r for r in asked if r.id in aborted])
    for name, c in {**done, **again}.items():
        same(c, want[name])


def test_abort_of_everything_leaves_an_idle_engine(make: Make) -> None:
    engine = make()
    asked = requests(SamplingParams(max_tokens=30, min_tokens=30))
    engine.submit(asked)
    assert {c.request_id for c in engine.abort([r.id for r in asked])} == {r.id for r in asked}
    assert engine.poll() == [] and engine.abort([r.id for r in asked]) == []


def test_versions_are_stamped_and_new_weights_give_fresh_results(make: Make) -> None:
    engine = make()
    params = SamplingParams(temperature=0, max_tokens=10)
    old = engine.generate(PROMPTS, params)
    assert {v for c in old for v in c.versions} == {0}
    with torch.no_grad():
        for p in engine.policy.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    engine.commit(7)
    assert engine.version == 7
    new = engine.generate(PROMPTS, params)
    assert {v for c in new for v in c.versions} == {7}
    assert [c.token_ids for c in new] != [c.token_ids for c in old]
    assert [c.logprobs for c in new] == [c.logprobs for c in make_like(engine).generate(PROMPTS, params)]


def make_like(engine: Any) -> Any:
    """A new engine, without any history, on the weights of this one."""
    return type(engine)(engine.policy, tiny.EOS)


def test_shared_weights_are_the_policys_own(make: Make) -> None:
    engine = make()
    assert engine.wanted() == ()
    with pytest.raises(RolloutError, match="'w'"):
        engine.receive("w", torch.zeros(1))


def test_place_released_and_back(make: Make) -> None:
    engine = make()
    params = SamplingParams(max_tokens=10, seed=2)
    before = engine.generate(PROMPTS, params, n=2)
    engine.place("released")
    engine.place("device")
    for a, b in zip(before, engine.generate(PROMPTS, params, n=2), strict=True):
        same(a, b)
    engine.place("host")
    same(before[0], engine.generate(PROMPTS, params, n=2)[0])


def test_the_context_ends_a_completion(make: Make, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, min_tokens=90)
    done = make(max_model_len=16).generate([PROMPTS[0], PROMPTS[3]], params)
    assert [(len(c.token_ids), c.finish) for c in done] == [(7, "length"), (3, "length")]
    whole = make().generate([PROMPTS[0]], params)[0]
    assert len(whole.token_ids) == tiny.CONTEXT - len(PROMPTS[0]) and whole.finish == "length"
    want = tiny.laws(reference(), PROMPTS[0], whole.token_ids, 1.0)
    np.testing.assert_allclose(whole.logprobs, want[range(len(whole.token_ids)), list(whole.token_ids)], atol=1e-4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenRequest("bad", "g", (), SamplingParams()), "'bad'.*empty"),
        (GenRequest("bad", "g", (1, tiny.VOCAB), SamplingParams()), f"'bad'.*token id {tiny.VOCAB}.*vocabulary"),
        (GenRequest("bad", "g", (1, -1), SamplingParams()), "'bad'.*token id -1.*vocabulary"),
        (GenRequest("bad", "g", (1,), SamplingParams(stop_token_ids=(99,))), "'bad'.*stop_token_ids.*99"),
        (GenRequest("bad", "g", (1,) * 20, SamplingParams()), "'bad'.*20 prompt tokens.*20"),
        (GenRequest("r0", "g", (1,), SamplingParams()), "'r0'.*already"),
    ],
    ids=["empty", "too-large", "negative", "stop", "context", "duplicate"],
)
def test_what_cannot_be_served_is_refused_whole(make: Make, request_: GenRequest, message: str) -> None:
    engine = make(max_model_len=20)
    good = requests(SamplingParams(max_tokens=3))[:2]
    with pytest.raises(RolloutError, match=message):
        engine.submit([*good, request_])
    assert engine.poll() == [], "no request of a refused call was queued"
    assert len(run(engine, good)) == 2


@pytest.mark.parametrize("temperature", [0, 1])
def test_min_tokens_where_every_token_ends_is_refused(make: Make, temperature: float) -> None:
    params = SamplingParams(temperature, min_tokens=1, max_tokens=4, stop_token_ids=tuple(range(tiny.VOCAB)))
    engine = make()
    with pytest.raises(RolloutError, match=r"'bad': min_tokens=1 leaves nothing to draw, as all 61 tokens end"):
        engine.submit([GenRequest("bad", "g", (1, 2), params)])
    assert engine.pending == 0
    ends = engine.generate([(1, 2)], replace(params, min_tokens=0))[0]
    assert len(ends.token_ids) == 1 and ends.finish == "stop"
    one_left = replace(params, stop_token_ids=tuple(t for t in range(tiny.VOCAB) if t != 33))
    done = engine.generate([(1, 2)], one_left)[0]
    assert done.token_ids[0] == 33, "the only token that does not end"


def test_generate_refuses_n_below_one(make: Make) -> None:
    with pytest.raises(RolloutError, match="n=0"):
        make().generate(PROMPTS, SamplingParams(), n=0)
    assert make().generate([], SamplingParams()) == []


def test_generate_refuses_to_mix_with_pending_requests(make: Make) -> None:
    engine = make()
    engine.submit(requests(SamplingParams(max_tokens=3))[:2])
    assert engine.pending == 2
    with pytest.raises(RolloutError, match="2 submitted requests are pending"):
        engine.generate(PROMPTS, SamplingParams())
    assert len(drain(engine, 2)) == 2 and engine.pending == 0


def test_a_failed_generate_leaves_nothing_behind(make: Make) -> None:
    engine = make()
    weight = next(engine.policy.parameters())
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate(PROMPTS, SamplingParams())
    assert engine.pending == 0
    with torch.no_grad():
        weight.copy_(good)
    same(engine.generate(PROMPTS, SamplingParams())[0], make().generate(PROMPTS, SamplingParams())[0])


def test_no_slots_at_all_is_refused(make: Make) -> None:
    with pytest.raises(RolloutError, match="max_sequences=0 must be 1 or more"):
        make(max_sequences=0)


def test_diverged_weights_name_the_request_and_recover(make: Make) -> None:
    """NaN logits are an error, and do not poison what is generated once the weights are good again."""
    engine = make()
    params = SamplingParams(temperature=0, max_tokens=6)
    want = engine.generate(PROMPTS, params)
    weight = next(engine.policy.parameters())
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    asked = requests(params)
    engine.submit(asked)
    with pytest.raises(RolloutError, match=r"'r0'.*not finite"):
        engine.poll()
    with torch.no_grad():
        weight.copy_(good)
    for i, c in drain(engine, len(asked)).items():
        same(c, want[int(i[1:])])


def test_counts_only_grow_and_say_what_was_prefilled(make: Make) -> None:
    """An engine that counts does so from 0; a prompt of several samples is prefilled once."""
    engine = make()
    assert not any(engine.counts().values())
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=3), n=4)
    first = engine.counts()
    engine.generate([PROMPTS[1]], SamplingParams(max_tokens=3))
    assert set(first) == set(engine.counts()) and all(engine.counts()[name] >= n for name, n in first.items())
    if first:
        assert first == {"prefilled_tokens": 9, "reused_tokens": 0, "preemptions": 0}
        assert engine.counts()["prefilled_tokens"] == 9 + 3
