"""Random traffic through a cache that is too small, against each request alone: in fp32 the same tokens, exactly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import make_model
from verl.core import Completion, GenRequest, SamplingParams
from verl.engines import rollout
from verl.engines.rollout import admission
from verl.engines.rollout.native import NativeEngine

LONGEST = 80
"""Tokens of the longest sequence, in whole grains."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine without limits, on which requests run one by one."""
    folder: Path = make_model(tmp_path_factory.mktemp(request.param), family=request.param, seed=7)
    return rollout.load("native", folder, dtype="float32", device="cpu")


def traffic(rng: random.Random, vocab: int) -> list[GenRequest]:
    """Seven requests over three prompts, two of which begin alike; most outgrow a share of the cache."""
    start = tuple(rng.randrange(3, vocab) for _ in range(rng.randint(1, 11)))
    prompts = [
        start,
        (*start, *(rng.randrange(3, vocab) for _ in range(rng.randint(1, 11)))),
        (1, rng.randrange(3, vocab)),
    ]
    out = []
    for i in range(7):
        least = rng.choice([0, 20, 35, 50])
        law = rng.choice([{"temperature": 0.0}, {}, {"temperature": 0.6}, {"top_k": 5, "top_p": 0.9}])
        params = SamplingParams(
            **law, max_tokens=rng.randint(max(least, 1), 56), min_tokens=least, seed=rng.getrandbits(70)
        )
        out.append(GenRequest(f"r{i}", "g", rng.choice(prompts), params))
    return out


def serve(engine: NativeEngine, asked: list[GenRequest], rng: random.Random) -> dict[str, Completion]:
    """Submit at random moments, now and then abort one and ask again, release the cache, or commit."""
    waiting, done = list(asked), {}
    by_name = {r.id: r for r in asked}
    for _ in range(5000):
        while waiting and (rng.random() < 0.5 or not engine.pending):
            engine.submit([waiting.pop()])
        done.update((c.request_id, c) for c in engine.poll())
        if rng.random() < 0.04:
            open_ids = sorted(set(by_name) - set(done) - {r.id for r in waiting})
            waiting += [by_name[c.request_id] for c in engine.abort(rng.sample(open_ids, min(1, len(open_ids))))]
        if rng.random() < 0.01:
            engine.place("released")
        if rng.random() < 0.01:
            engine.commit(engine.version + 1)
        if len(done) == len(asked):
            return done
    raise AssertionError(f"{sorted(set(by_name) - set(done))} never finished")


def test_whatever_happens_the_tokens_are_those_of_each_request_alone(
    alone: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_AHEAD", 2)  # so that those admitted soon outgrow the cache
    preemptions = 0
    for seed in range(4):
        rng = random.Random(seed)
        asked = traffic(rng, alone.limits.vocab_size)
        slots = rng.uniform(2.2, 3.2)
        engine = NativeEngine(
            alone.policy,
            alone.limits.eos_token_ids,
            max_sequences=rng.randint(4, 7),
            prefill_tokens=rng.choice([3, 16, 64, 4096]),
            kv_cache_gb=slots * LONGEST * alone._budget.token_bytes / 1e9,
            prefix_cache_gb=rng.choice([0, 64]) * alone._budget.token_bytes / 1e9,
        )
        done = serve(engine, asked, rng)
        preemptions += engine.counts()["preemptions"]
        assert engine.pending == 0 and engine.cache_bytes <= slots * LONGEST * alone._budget.token_bytes
        for request in asked:
            want = alone.generate([request.token_ids], request.params)[0]
            got = done[request.id]
            assert got.token_ids == want.token_ids and got.finish == want.finish, (seed, request)
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=2e-5)
            assert len(got.versions) == len(got.token_ids) and list(got.versions) == sorted(got.versions)
    assert preemptions >= 8
