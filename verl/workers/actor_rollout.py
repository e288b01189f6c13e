"""The policy with its sampler in one process, on the same weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.controller.dispatch import ALL_TO_ALL, ONE_TO_ALL, RANK_ZERO
from verl.controller.worker import register
from verl.core.generation import Completion, GenRequest
from verl.core.protocols import Place
from verl.engines.rollout.base import Engine
from verl.models.policy import AnyPolicy
from verl.parallel.mesh import SINGLE, Mesh
from verl.weights.publisher import InProcessPublisher
from verl.workers.actor import ActorWorker


class ActorRolloutWorker(ActorWorker):
    """generator: a rollout engine on the policy's own weights. Its methods here are what `GroupEngine` calls."""

    def __init__(
        self,
        policy: AnyPolicy,
        cfg: RunConfig,
        algorithm: Algorithm,
        device: str,
        total_steps: int,
        generator: Engine,
        mesh: Mesh = SINGLE,
    ):
        super().__init__(policy, cfg, algorithm, device, total_steps, mesh)
        self.generator = generator
        self.publisher = InProcessPublisher(generator, self.engine.shards)

    @register(RANK_ZERO)
    def described(self) -> tuple[str, str]:
        """Which code trains and which generates, for lines of the log."""
        return self.policy.described, self.generator.described

    @register(ONE_TO_ALL)
    def publish(self, version: int) -> None:
        """Generate with the weights of now, as `version`."""
        self.publisher.publish(version)

    @register(ALL_TO_ALL)
    def submit(self, requests: Sequence[GenRequest]) -> None:
        """Queue this rank's requests."""
        self.generator.submit(requests)

    @register(ONE_TO_ALL)
    def advance(self, seconds: float) -> list[Completion]:
        """Generate for about `seconds`, or until nothing is left to do; what finished on the way."""
        done: list[Completion] = []
        end = time.perf_counter() + seconds
        while self.generator.pending and time.perf_counter() < end:
            done += self.generator.poll()
        return done

    @register(ONE_TO_ALL)
    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Stop those of these requests that are here."""
        return self.generator.abort(request_ids)

    @register(ONE_TO_ALL)
    def counts(self) -> Mapping[str, int]:
        """What the generator has counted so far."""
        return self.generator.counts()

    @register(ONE_TO_ALL)
    def place(self, where: Place) -> None:
        self.generator.place(where)
