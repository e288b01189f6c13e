"""The loop: one for every algorithm. It names no algorithm and no backend; everything else is a hook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.controller.group import WorkerGroup, gather
from verl.core.batch import Batch
from verl.core.metrics import Metrics
from verl.core.trajectory import Trajectory
from verl.rewards.composer import Rewards
from verl.trainer.collect import Collector
from verl.trainer.early_scores import Ask
from verl.trainer.hooks import Hook
from verl.trainer.reward import RewardScorer
from verl.trainer.source import OnDemandSource
from verl.utils.timing import StepClock
from verl.weights.publisher import Publishes
from verl.workers.critic import explained
from verl.workers.update_plan import UpdatePlan


def skipped() -> Metrics:
    """Of a step without a token to learn from: no optimizer step is made, and the weights stay."""
    return Metrics().sum("update/skipped", 1.0)


@dataclass(frozen=True)
class Roles:
    """Worker groups by role; the algorithm's needs decide which are not None. apart: those on other processes than the
    actor's.
    """

    actor: WorkerGroup
    ref: WorkerGroup | None = None
    critic: WorkerGroup | None = None
    apart: frozenset[str] = frozenset()

    def asks(self) -> list[Ask]:
        """What models score that can do so while the actor samples."""
        return [ask for role, ask in self._scorers().items() if role in self.apart]

    def _scorers(self) -> dict[str, Ask]:
        ref = {} if self.ref is None else {"ref": Ask("ref_logprobs", self.ref, "ref_logprobs")}
        return ref | ({} if self.critic is None else {"critic": Ask("values", self.critic, "values")})

    def trained(self) -> dict[str, WorkerGroup]:
        """Those whose models change, by name."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})


@dataclass(frozen=True)
class StepResult:
    """What hooks may look at after a step. batch: what was trained on; trajectories, rewards: all that was sampled."""

    step: int
    batch: Batch
    trajectories: list[Trajectory]
    rewards: Rewards
    metrics: dict[str, float]


@dataclass
class Trainer:
    """cfg, the roles, and the parts that a step is made of. `step` and `version` are all the state it has itself."""

    cfg: RunConfig
    roles: Roles
    collector: Collector
    algorithm: Algorithm
    publisher: Publishes
    hooks: Sequence[Hook] = ()
    step: int = 0
    version: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)
    planned_steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.planned_steps = self.cfg.trainer.num_episodes * self.source.steps_per_episode

    @property
    def source(self) -> OnDemandSource:
        return self.collector.source

    @property
    def reward(self) -> RewardScorer:
        return self.collector.reward

    def fit(self) -> None:
        """Train from the current step to the planned last one."""
        self.publisher.publish(self.version)
        for hook in self.hooks:
            hook.before_run(self)
        while self.step < self.planned_steps:
            result = self.train_step()
            for hook in self.hooks:
                hook.after_step(self, result)
            self.last_metrics = result.metrics
        for hook in self.hooks:
            hook.after_run(self)

    def train_step(self) -> StepResult:
        clock = StepClock()
        self.step += 1
        got = self.collector.collect(self.step, partial(self.phase, clock))
        batch, learned = self.learn(got.batch, clock) if got.batch.num_seqs else (got.batch, skipped())
        metrics = self.algorithm.summary(Metrics.merge([got.metrics, learned, clock.metrics()]).values_by_name())
        return StepResult(self.step, batch, got.trajectories, got.rewards, metrics)

    def learn(self, batch: Batch, clock: StepClock) -> tuple[Batch, Metrics]:
        """From rewards to new weights: the batch with all its columns, and what was seen on the way."""
        with self.phase(clock, "score"):
            batch = self.score(batch)
        with self.phase(clock, "credit"):
            batch, credit = self.algorithm.credit(batch)
        with self.phase(clock, "update"):
            learned = self.update(batch)
        with self.phase(clock, "publish"):
            self.version += 1
            self.publisher.publish(self.version)
        return batch, Metrics.merge([credit, learned])

    def score(self, batch: Batch) -> Batch:
        """Ask every model at once, and only for the columns that the algorithm reads and the batch has not yet."""
        needs, r = self.algorithm.needs, self.roles
        asked: list[Any] = []
        if "sum_pi_squared" in needs:
            asked.append(r.actor.call("old_logprobs_and_squares", batch))
        elif "old_logprobs" in needs:
            asked.append(r.actor.call("old_logprobs", batch))
        if r.ref is not None and "ref_logprobs" not in batch:
            asked.append(r.ref.call("ref_logprobs", batch))
        if r.critic is not None and "values" not in batch:
            asked.append(r.critic.call("values", batch))
        return batch.merge(*gather(*asked))

    def update(self, batch: Batch) -> Metrics:
        """The plan fixes mini-batches and their global counts, so no number of ranks changes the loss."""
        plan = UpdatePlan.of(batch, self.cfg.update, self.cfg.trainer.seed, self.step)
        if not plan.minibatches:
            return skipped()
        jobs: list[Any] = []
        seen = Metrics().sum("update/skipped", 0.0)
        if self.roles.critic is not None:
            seen = Metrics.merge([seen, explained(batch)])
            jobs.append(self.roles.critic.call("update_critic", batch, plan=plan))
        if self.roles.critic is None or self.step > self.cfg.critic.warmup_steps:
            jobs.append(self.roles.actor.call("update_actor", batch, plan=plan))
        return Metrics.merge([seen, *gather(*jobs)])

    @contextmanager
    def phase(self, clock: StepClock, name: str) -> Iterator[None]:
        for hook in self.hooks:
            hook.on_phase(name)
        with clock(name):
            yield

    def state(self) -> dict[str, dict[str, Any]]:
        """What the next step depends on by component, but for the models that are trained."""
        return {
            "trainer": {"step": self.step, "version": self.version},
            "source": self.source.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        self.step, self.version = int(state["trainer"]["step"]), int(state["trainer"]["version"])
        self.source.load_state_dict(state["source"])
        self.algorithm.load_state_dict(state["algorithm"])
