"""Rewards while others are sampled: the same numbers in less time, and nothing left behind when something fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import tiny_run
from tests.trainer.test_filtered_runs import resampled
from verl.config import RunConfig
from verl.config.loader import check
from verl.core import Completion, Prompt, RewardError
from verl.core.generation import GenRequest
from verl.data import PromptSampler
from verl.rewards import RewardComposer, RewardFunction
from verl.rewards.build import build_rewards, early_parts
from verl.rewards.verifiers import VERIFIERS
from verl.trainer import run
from verl.trainer.collect import Collected, Collector
from verl.trainer.reward import RewardScorer
from verl.trainer.source import OnDemandSource
from verl.utils.timing import StepClock
from verl.workers.rollout import RolloutWorker

PROMPTS, N = 6, 2


class SlowEngine:
    """Each poll takes `seconds` and finishes one whole group, the last one first. fault: raised by the third poll."""

    version = 0

    def __init__(self, seconds: float = 0.0, fault: type[BaseException] | None = None):
        self.seconds, self.fault, self.polls = seconds, fault, 0
        self.open: list[GenRequest] = []
        self.aborted: set[str] = set()

    def submit(self, requests: Sequence[GenRequest]) -> None:
        self.open += requests

    def counts(self) -> dict[str, int]:
        return {}

    def poll(self) -> list[Completion]:
        self.polls += 1
        if self.fault is not None and self.polls == 3:
            raise self.fault
        time.sleep(self.seconds)
        done, self.open = self.open[-N:], self.open[:-N]
        return [Completion(r.id, (r.params.seed % 97, 7), (-1.0, -1.0), "stop", (0, 0)) for r in done]

    def abort(self, ids: Any) -> list[Completion]:
        self.aborted = set(ids)
        self.open = [r for r in self.open if r.id not in self.aborted]
        return []


def collector(engine: SlowEngine, stream: bool | str, fn: Callable[..., Any], **sections: Any) -> Collector:
    base = {"trainer": {"prompts_per_step": PROMPTS}, "rollout": {"n": N}}
    cfg = check(RunConfig, base | sections)
    prompts = [Prompt(str(i), (1, i + 2), f"p{i}", reference="5", source="gsm8k") for i in range(20)]
    worker = RolloutWorker(engine, SimpleNamespace(decode=lambda ids, **k: str(ids[0])), seed=3)
    source = OnDemandSource(prompts, PromptSampler(20, PROMPTS, 3), worker, cfg)
    composer = RewardComposer([RewardFunction("digits", fn, 0.5)], {"gsm8k": VERIFIERS["gsm8k"].fn})
    reward = RewardScorer(composer, None, early_parts(stream, composer))
    return Collector(cfg, source, reward, frozenset(), lambda text: None)


def step(c: Collector) -> tuple[Collected, dict[str, float], float]:
    clock, start = StepClock(), time.perf_counter()
    got = c.collect(1, clock)
    return got, clock.seconds, time.perf_counter() - start


def digits(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(r) / 7 + len(p) for p, r in zip(prompts, responses, strict=True)]


def left_over() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "early-rewards"]


def test_a_slow_reward_runs_while_others_are_sampled() -> None:
    def slow(prompts: list[str], responses: list[str]) -> list[float]:
        time.sleep(0.05 * len(responses))
        return digits(prompts, responses)

    results = {stream: step(collector(SlowEngine(0.1), stream, slow)) for stream in (False, True)}
    (late, late_s, late_wall), (early, early_s, early_wall) = results[False], results[True]
    assert late_s["rollout"] > 0.6 and late_s["reward"] > 0.6 and late_wall > 1.2
    assert early_wall < 1.05, "about the longer of 0.6 s and 0.6 s, and one call more; not their sum"
    assert early_s["rollout"] > 0.6 and 0.05 < early_s["reward"] < 0.35, "what was waited for after the last sample"
    overlap = [r.metrics.values_by_name()["perf/reward_overlap"] for r in (late, early)]
    assert overlap[0] == 0 and 0.3 < overlap[1] < 0.65
    assert overlap[1] + early_s["reward"] == pytest.approx(0.6, abs=0.15), "no second is counted twice or lost"
    assert late.rewards == early.rewards and not left_over()
    assert [t.token_ids for t in late.trajectories] == [t.token_ids for t in early.trajectories]


@pytest.mark.parametrize("stream", [False, "auto", True])
def test_who_is_called_with_what_and_where(stream: bool | str) -> None:
    calls: list[tuple[str, list[str]]] = []
    judged: list[str] = []

    def watched(prompts: list[str], responses: list[str]) -> list[float]:
        calls.append((threading.current_thread().name, prompts))
        return digits(prompts, responses)

    c = collector(SlowEngine(0.005), stream, watched)
    gsm8k = c.reward.composer.verifiers["gsm8k"]
    c.reward.composer.verifiers["gsm8k"] = lambda r, p: judged.append(threading.current_thread().name) or gsm8k(r, p)
    c.collect(1, StepClock())
    main = threading.main_thread().name
    assert set(judged) == {main if stream is False else "early-rewards"} and len(judged) == PROMPTS * N
    planned = [f"p{i}" for i in c.source.planned(1) for _ in range(N)]
    seen = [p for _, prompts in calls for p in prompts]
    assert {name for name, _ in calls} == {"early-rewards" if stream is True else main}
    if stream is not True:
        assert seen == planned and len(calls) == 1
    assert sorted(seen) == sorted(planned)
    assert all(prompts[i] == prompts[i + 1] for _, prompts in calls for i in range(0, len(prompts), N)), "whole groups"


def test_math_keeps_its_deadline_and_so_the_main_thread() -> None:
    data = [Prompt("0", (1,), "", reference="5", source="gsm8k"), Prompt("1", (1,), "", reference="5", source="math")]
    for prompts, want in ((data[:1], {"verifier"}), (data, set())):
        composer = RewardComposer(verifiers={p.source: VERIFIERS[p.source].fn for p in prompts})
        assert early_parts("auto", composer) == early_parts(True, composer) == want
        assert early_parts(False, composer) == frozenset()
    with_function = build_rewards(RunConfig().reward, [], [RewardFunction("f", digits)])
    assert early_parts("auto", with_function) == frozenset() and early_parts(True, with_function) == {"f"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [lambda p, r: [1.0], lambda p, r: 1 / 0, lambda p, r: [float("nan")] * len(r)])
def test_a_failing_reward_ends_the_rollout_at_once_by_name(stream: bool, fault: Callable[..., Any]) -> None:
    engine = SlowEngine(0.02)
    with pytest.raises(RewardError, match=r"^reward function 'digits': (returned 1 value|raised ZeroDiv|row 0: nan)"):
        step(collector(engine, stream, fault))
    assert not left_over() and not engine.open
    if stream:
        assert engine.polls < PROMPTS and len(engine.aborted) == N * (PROMPTS - engine.polls)
    else:
        assert engine.polls == PROMPTS and not engine.aborted


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_a_failing_rollout_leaves_no_thread_and_no_request(fault: type[BaseException]) -> None:
    engine = SlowEngine(0.0, fault)

    def slow(prompts: list[str], responses: list[str]) -> list[float]:
        time.sleep(0.2)
        return digits(prompts, responses)

    with pytest.raises(fault):
        step(collector(engine, True, slow))
    assert not left_over() and not engine.open and len(engine.aborted) == N * (PROMPTS - 2)


def test_an_interrupt_while_rewards_are_waited_for() -> None:
    calls = []

    def slow(prompts: list[str], responses: list[str]) -> list[float]:
        calls.append(len(responses))
        time.sleep(0.4)
        return digits(prompts, responses)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        step(collector(SlowEngine(), True, slow))
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert not left_over() and len(calls) == 1 and time.perf_counter() - start < 2.0


@pytest.mark.parametrize("stream", ["auto", True])
@pytest.mark.parametrize("preset", ["grpo", "remax"])
def test_a_run_is_the_same_to_the_bit(tmp_path, preset: str, stream: bool | str) -> None:
    more = resampled(retire_pass_rate=None)
    reward = more["reward"] | {"overlong": {"buffer": 0.5}}
    for name, value in (("a", False), ("b", stream)):
        trainer = {"output_dir": str(tmp_path / name), "num_episodes": 1}
        run(tiny_run.config(tmp_path, preset, **(more | {"reward": reward | {"stream": value}}), trainer=trainer))
    rows = tiny_run.metrics(tmp_path / "a")
    assert rows == tiny_run.metrics(tmp_path / "b")
    assert max(r.get("filter/rounds", 0) for r in rows) > 1, "rounds of resampling were to be part of it"
    left, right = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert all(torch.equal(left[k], right[k]) for k in left)


def test_slow_functions_are_told_of_once(tmp_path, capsys) -> None:
    cfg = tiny_run.config(tmp_path, "grpo", trainer={"num_episodes": 1, "max_steps_per_episode": 2}, eval={"every": 0})

    def slow(prompts: list[str], responses: list[str]) -> list[float]:
        time.sleep(1.1 if len(responses) == 16 else 0.0)
        return [0.0] * len(responses)

    run(cfg, functions=[(slow, 1.0)])
    out = capsys.readouterr().out
    assert out.count("reward.stream=true") == 1 and "(digits, slow)" in out
