"""The policy with its sampler in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.controller.dispatch import ALL_TO_ALL, ONE_TO_ALL, RANK_ZERO
from verl.controller.worker import register
from verl.core.generation import Completion, GenRequest
from verl.core.protocols import Place
from verl.engines.resharding import transport
from verl.engines.rollout.base import Engine
from verl.engines.rollout.receiver import Receiver
from verl.models.policy import AnyPolicy
from verl.parallel.axes import TensorParallel
from verl.parallel.mesh import SINGLE, Mesh
from verl.weights.publisher import InProcessPublisher, Publishes, RankPublisher
from verl.workers.actor import ActorWorker


class ActorRolloutWorker(ActorWorker):
    """generator: a rollout engine, on the policy's own weights where `copy` is None, else on those of `copy`, which get
    the policy's at each publish. tp: the ranks that generate together, which poll in step and of which the first
    answers. Its methods here are what `GroupEngine` calls.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        cfg: RunConfig,
        algorithm: Algorithm,
        device: str,
        total_steps: int,
        generator: Engine,
        mesh: Mesh = SINGLE,
        copy: AnyPolicy | None = None,
        tp: TensorParallel | None = None,
    ):
        super().__init__(policy, cfg, algorithm, device, total_steps, mesh)
        self.generator, self.tp = generator, tp
        self.publisher: Publishes = InProcessPublisher(generator, self.engine.shards)
        self.receiver = None if copy is None else Receiver(generator, copy)
        if copy is not None and self.receiver is not None:
            carrier = transport(self.engine, copy, cfg.parallel.deadline)
            self.publisher = RankPublisher(self.receiver, self.engine.shards, carrier)

    def make_room(self) -> None:
        """A GPU's memory is for activations now. On a CPU new memory costs more time than this saves."""
        if self.engine.device == "cpu":
            return
        self.generator.place("released")
        if self.receiver is not None:
            self.receiver.free()

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that generate with it."""
        return self.tp is None or self.tp.first

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
        while self.generator.pending and self._agreed(time.perf_counter() < end):
            done += self.generator.poll()
        return done if self.leads else []

    def _agreed(self, on: bool) -> bool:
        """What the first of the ranks that generate together says: each has the same number of polls, or one would wait
        in a collective for another that has stopped.
        """
        if self.tp is None:
            return on
        flag = torch.tensor(int(on), device=self.engine.device)
        dist.broadcast(flag, group=self.tp.group, group_src=0)
        return bool(flag)

    @register(ONE_TO_ALL)
    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Stop those of these requests that are here."""
        stopped = self.generator.abort(request_ids)
        return stopped if self.leads else []

    @register(ONE_TO_ALL)
    def counts(self) -> Mapping[str, int]:
        """What the generator has counted so far."""
        return self.generator.counts() if self.leads else {}

    @register(ONE_TO_ALL)
    def place(self, where: Place) -> None:
        self.generator.place(where)
