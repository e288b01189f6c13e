"""One step of PPO over pretenders: the loop's own calls, its packing and its credit, without models and rewards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from cases.pretend import make
from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.config import RunConfig, resolve
from verl.controller.executors.ray import ResourcePool
from verl.controller.executors.ray_group import RayGroup
from verl.core.batch import Batch
from verl.core.generation import SamplingParams
from verl.core.prompt import Prompt
from verl.parallel.layout import Layout
from verl.trainer.loop import Roles, Trainer
from verl.utils.timing import StepClock
from verl.weights.publisher import InProcessPublisher
from verl.workers.group_engine import GroupEngine
from verl.workers.rollout import RolloutWorker

SAMPLES = 8
"""Of each prompt."""
ROLES = ("actor", "ref", "critic")


class _NoText:
    """In place of a tokenizer: what it decodes is no work of control."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""


@dataclass(frozen=True)
class Stepped:
    """Of one step: wall seconds, those of them outside of worker methods, bytes each way, seconds by phase."""

    seconds: float
    outside: float
    sent: int
    received: int
    phases: dict[str, float] = field(default_factory=dict)


class Control:
    """PPO with a critic and a reference on `pools`, a pool for each role.

    seconds: that a method takes on one process; on more, each takes its share.
    """

    def __init__(self, pools: Mapping[str, ResourcePool], seconds: Mapping[str, float] | None = None):
        cfg = configuration()
        self.groups = {
            role: RayGroup(pool, role, Layout(dp=pool.world), partial(make, role, _shares(seconds or {}, pool.world)))
            for role, pool in pools.items()
        }
        layout = self.groups["actor"].layout
        engine = GroupEngine(self.groups["actor"], [layout.coord(rank) for rank in range(layout.world)])
        self.sampler = RolloutWorker(engine, _NoText(), seed=0)
        idle: Any = SimpleNamespace(source=SimpleNamespace(steps_per_episode=1))
        roles = Roles(self.groups["actor"], self.groups["ref"], self.groups["critic"])
        self.trainer = Trainer(cfg, roles, idle, Algorithm(cfg), InProcessPublisher(engine, dict))

    def step(self, sequences: int, tokens: int) -> Stepped:
        """From prompts to new weights; `tokens` of each sequence, of which a quarter is its prompt."""
        self.trainer.step += 1
        before, clock, start = self._counted(), StepClock(), time.perf_counter()
        with clock("rollout"):
            params = SamplingParams(max_tokens=tokens - tokens // 4)
            prompts = [Prompt(str(i), tuple(range(tokens // 4)), "") for i in range(sequences // SAMPLES)]
            sampled = self.sampler.sample(prompts, SAMPLES, params, "train", self.trainer.step)
        with clock("pack"):
            batch = Batch.of(sampled).with_(reward=torch.arange(float(len(sampled))) % 2)
        self.trainer.learn(batch, clock)
        seconds = time.perf_counter() - start
        worked, sent, received = (now - was for now, was in zip(self._counted(), before, strict=True))
        return Stepped(seconds, seconds - worked, int(sent), int(received), clock.seconds)

    def _counted(self) -> tuple[float, int, int]:
        """Seconds in workers and bytes each way, of all roles so far."""
        stats = [group.stats for group in self.groups.values()]
        return (
            sum(s.worker_seconds for s in stats),
            sum(s.bytes_sent for s in stats),
            sum(s.bytes_received for s in stats),
        )


def _shares(seconds: Mapping[str, float], ranks: int) -> dict[str, float]:
    return {method: whole / ranks for method, whole in seconds.items()}


def configuration() -> RunConfig:
    own: dict[str, Any] = {"algorithm": {"name": "ppo"}, "actor": {"path": "none"}, "rollout": {"n": SAMPLES}}
    return resolve([own], preset_values())
