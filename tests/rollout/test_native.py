"""What only the native engine promises: shared prefill, slots, and sequences that outlive a change of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout import tiny
from tests.rollout.test_contract import PROMPTS, drain, requests, run, same
from verl.config.rollout import RolloutConfig
from verl.core import GenRequest, SamplingParams
from verl.engines import rollout


@pytest.fixture
def native(folders: Callable[..., Path]) -> Callable[..., Any]:
    return lambda **options: rollout.load("native", folders("mistral"), dtype="float32", device="cpu", **options)


class Meter:
    """Counts the tokens that each forward of a decoder computes."""

    def __init__(self, engine: Any):
        self.tokens: list[int] = []
        engine.policy.decoder.register_forward_pre_hook(lambda _, args: self.tokens.append(len(args[0])))


def test_samples_of_a_prompt_share_its_prefill(native: Callable[..., Any]) -> None:
    engine = native()
    meter = Meter(engine)
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=1), n=8)
    assert meter.tokens == [len(PROMPTS[0])]


def test_a_group_cut_by_the_slots_is_prefilled_once(native: Callable[..., Any]) -> None:
    params = SamplingParams(max_tokens=5, min_tokens=5, seed=3)
    engine = native(max_sequences=3)
    meter = Meter(engine)
    few = engine.generate([PROMPTS[0]], params, n=8)
    assert [n for n in meter.tokens if n > 3] == [len(PROMPTS[0])]
    for a, b in zip(few, native().generate([PROMPTS[0]], params, n=8), strict=True):
        same(a, b)


def test_a_common_beginning_is_computed_once(native: Callable[..., Any]) -> None:
    system = tuple(range(10, 30))
    prompts = [(*system, 40, 41), (*system, 42), (*system, 43, 44, 45), PROMPTS[1]]
    engine = native()
    meter = Meter(engine)
    params = SamplingParams(max_tokens=6, min_tokens=6, seed=3)
    together = engine.generate(prompts, params, n=2)
    assert meter.tokens[0] == 20 + 2 + 1 + 3 + 3
    for i, prompt in enumerate(prompts):
        for a, b in zip(together[2 * i : 2 * i + 2], engine.generate([prompt], params, n=2), strict=True):
            same(a, b)


def test_prefill_budget_is_kept(native: Callable[..., Any]) -> None:
    engine = native(prefill_tokens=12)
    meter = Meter(engine)
    params = SamplingParams(max_tokens=4, min_tokens=4, seed=3)
    done = engine.generate(PROMPTS, params)
    prefills = [sum(map(len, unit)) for unit in ([PROMPTS[0], PROMPTS[1]], [PROMPTS[2]], [PROMPTS[3]], [PROMPTS[4]])]
    assert meter.tokens[:2] == prefills[:2] and max(meter.tokens) == 12
    for a, b in zip(done, native().generate(PROMPTS, params), strict=True):
        same(a, b)


def test_decoding_goes_on_over_a_commit(native: Callable[..., Any], reference: Any) -> None:
    """Tokens drawn before keep their version; those after are drawn as if the new weights had read all of it."""
    engine = native()
    params = SamplingParams(temperature=0.7, max_tokens=12, min_tokens=11, seed=5)
    asked = requests(params)
    engine.submit(asked)
    for _ in range(5):
        assert engine.poll() == []
    module = reference("mistral")
    theirs = dict(module.named_parameters())
    with torch.no_grad():
        for name, p in engine.policy.named_parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1
            p.add_(noise)
            theirs[name].add_(noise)
    engine.commit(3)
    done = drain(engine, len(asked))
    for request in asked:
        c = done[request.id]
        assert c.versions == (0,) * 5 + (3,) * 7
        law = tiny.laws(module, request.token_ids, c.token_ids, 0.7)
        law[:11, list(tiny.EOS)] = float("-inf")  # min_tokens
        law = law.log_softmax(-1)
        np.testing.assert_allclose(c.logprobs[5:], law[range(12), list(c.token_ids)][5:], atol=1e-4)


@pytest.mark.parametrize("polls", range(1, 7))
def test_release_in_the_middle_changes_nothing(native: Callable[..., Any], polls: int) -> None:
    asked = [GenRequest(f"r{i}", "g", PROMPTS[i % 3], SamplingParams(max_tokens=6, seed=i)) for i in range(7)]
    want, engine = run(native(), asked), native(max_sequences=4)
    engine.submit(asked)
    done = {}
    for _ in range(polls):
        done.update((c.request_id, c) for c in engine.poll())
    engine.place("released")
    assert engine.cache_bytes == 0
    done.update(drain(engine, len(asked) - len(done)))
    for name, c in done.items():
        same(c, want[name])


def test_prefix_of_an_aborted_group_is_dropped(native: Callable[..., Any]) -> None:
    """Abort the rest of a cut group, then ask for the same prompt between two others."""
    params = SamplingParams(max_tokens=8, min_tokens=8, seed=1)
    engine = native(max_sequences=4)
    engine.submit([GenRequest(f"a{i}", "a", PROMPTS[0], params) for i in range(6)])
    engine.poll()
    assert len(engine.abort([f"a{i}" for i in range(6)])) == 6
    shared = [(*PROMPTS[0][:-1], t) for t in (50, PROMPTS[0][-1], 51)]
    asked = [GenRequest(f"b{i}", "b", p, params) for i, p in enumerate(shared)]
    done, want = run(engine, asked), run(native(), asked)
    for name, c in done.items():
        same(c, want[name])


def test_the_cache_is_allocated_once_and_reused(native: Callable[..., Any]) -> None:
    engine = native()
    assert engine.cache_bytes == 0
    params = SamplingParams(max_tokens=10, seed=1)
    engine.generate(PROMPTS, params, n=3)
    size, where = engine.cache_bytes, engine._cache.keys[0].data_ptr()
    engine.generate(PROMPTS, params, n=3)
    assert engine.cache_bytes == size and engine._cache.keys[0].data_ptr() == where


def test_one_copy_of_the_weights_on_both_backends(folders: Callable[..., Path]) -> None:
    """Engines attached to a policy read its storage; the transformers module around a native policy too."""
    policy = rollout.load("native", folders("qwen3"), dtype="float32", device="cpu").policy
    for backend in ("native", "hf"):
        engine: Any = rollout.attach(backend, policy, RolloutConfig(max_sequences=4))
        assert engine.policy is policy
    own = {name: p.data_ptr() for name, p in policy.named_parameters()}
    theirs = {name: p.data_ptr() for name, p in engine._module.named_parameters()}
    assert {name: theirs[name] for name in own} == own
    assert set(theirs.values()) == set(own.values())
