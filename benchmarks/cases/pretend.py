"""Workers that answer as actor, reference and critic do, with columns of the right size, and compute nothing.

What a step of them takes is what control costs. `seconds` makes a method sleep instead, where time is what is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from verl.controller.rank import Rank
from verl.controller.worker import Worker
from verl.core.batch import Batch
from verl.core.generation import Completion, GenRequest
from verl.core.metrics import Metrics
from verl.workers.actor_rollout import ActorRolloutWorker
from verl.workers.critic import CriticWorker
from verl.workers.reference import ReferenceWorker
from verl.workers.update_plan import UpdatePlan

F = TypeVar("F", bound=Callable[..., Any])


def _as(method: Any) -> Callable[[F], F]:
    """Marks a method as `method` of the real worker is: the same columns travel, to the same ranks."""

    def mark(fn: F) -> F:
        fn.__dict__["operation"] = method.operation
        return fn

    return mark


class Pretender(Worker):
    """seconds: that a method sleeps, by name; the others take none."""

    def __init__(self, seconds: Mapping[str, float]):
        self.seconds = seconds

    def column(self, batch: Batch, name: str, method: str) -> Batch:
        time.sleep(self.seconds.get(method, 0.0))
        return Batch(batch.cu_seqlens, {name: torch.full((batch.num_tokens,), -0.5)})

    def learned(self, batch: Batch, method: str) -> Metrics:
        """As many numbers as an update tells."""
        time.sleep(self.seconds.get(method, 0.0))
        seen = Metrics()
        for number in range(20):
            seen.mean(f"{method}/{number}", 1.0, float(batch.num_tokens))
        return seen


class PretendActor(Pretender):
    """Every request is answered with as many tokens as it may have."""

    def __init__(self, seconds: Mapping[str, float]):
        super().__init__(seconds)
        self.waiting: list[GenRequest] = []
        self.version = 0

    @_as(ActorRolloutWorker.submit)
    def submit(self, requests: Sequence[GenRequest]) -> None:
        self.waiting = list(requests)

    @_as(ActorRolloutWorker.advance)
    def advance(self, seconds: float) -> list[Completion]:
        time.sleep(self.seconds.get("advance", 0.0) if self.waiting else 0.0)
        done, self.waiting = [self._completion(request) for request in self.waiting], []
        return done

    def _completion(self, request: GenRequest) -> Completion:
        n = request.params.max_tokens
        drawn = torch.rand(n, generator=torch.Generator().manual_seed(request.params.seed % 2**63)).tolist()
        ids, logprobs = tuple(int(50_000 * x) for x in drawn), tuple(-x for x in drawn)
        return Completion(request.id, ids, logprobs, "length", (self.version,) * n)

    @_as(ActorRolloutWorker.counts)
    def counts(self) -> Mapping[str, int]:
        return {"prefilled_tokens": 0, "reused_tokens": 0}

    @_as(ActorRolloutWorker.publish)
    def publish(self, version: int) -> None:
        time.sleep(self.seconds.get("publish", 0.0))
        self.version = version

    @_as(ActorRolloutWorker.old_logprobs)
    def old_logprobs(self, batch: Batch) -> Batch:
        return self.column(batch, "old_logprobs", "old_logprobs")

    @_as(ActorRolloutWorker.update_actor)
    def update_actor(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        return self.learned(batch, "update_actor")


class PretendReference(Pretender):
    @_as(ReferenceWorker.ref_logprobs)
    def ref_logprobs(self, batch: Batch) -> Batch:
        return self.column(batch, "ref_logprobs", "ref_logprobs")


class PretendCritic(Pretender):
    @_as(CriticWorker.values)
    def values(self, batch: Batch) -> Batch:
        return self.column(batch, "values", "values")

    @_as(CriticWorker.update_critic)
    def update_critic(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        return self.learned(batch, "update_critic")


PRETENDERS: dict[str, type[Pretender]] = {"actor": PretendActor, "ref": PretendReference, "critic": PretendCritic}


def make(role: str, seconds: Mapping[str, float], rank: Rank) -> Worker:
    """The worker of a role, in the process where it lives; the same on every rank."""
    return PRETENDERS[role](seconds)
