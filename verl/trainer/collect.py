"""What a step trains on: rollout and reward, in rounds until enough prompts teach something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.config.run import RunConfig
from verl.core.batch import Batch
from verl.core.errors import VerlError
from verl.core.metrics import Metrics
from verl.core.trajectory import Trajectory
from verl.rewards.composer import OVERLONG, Rewards
from verl.rewards.overlong import overlong
from verl.trainer.early import EarlyRewards
from verl.trainer.early_scores import Ask, EarlyScores
from verl.trainer.filters import counts, keeps, solved
from verl.trainer.reward import RewardScorer, reward_metrics
from verl.trainer.seldom import Seldom
from verl.trainer.source import Group, OnDemandSource

Phase = Callable[[str], AbstractContextManager[None]]
"""`with phase("rollout"): ...` times it and tells who watches."""


@dataclass(frozen=True)
class Collected:
    """What a step trains on and what it saw.

    batch: the groups that are trained on, with their reward columns; without sequences where no group teaches anything.
    trajectories, rewards: of every response sampled, the greedy ones excepted; metrics: over all of these.
    """

    batch: Batch
    trajectories: list[Trajectory]
    rewards: Rewards
    metrics: Metrics


@dataclass(frozen=True)
class Scored:
    """A group with its rewards. kept: whether it teaches something; greedy: total reward of the greedy response."""

    group: Group
    rewards: Rewards
    kept: bool
    greedy: float | None


class Collector:
    """source: samples prompts; reward: scores responses; needs: columns that the algorithm reads; warn: prints. asks:
    columns of models on processes of their own, which score what is done while the rest is sampled.
    """

    def __init__(
        self,
        cfg: RunConfig,
        source: OnDemandSource,
        reward: RewardScorer,
        needs: frozenset[str],
        warn: Callable[[str], None],
        asks: Sequence[Ask] = (),
    ):
        self.asks = asks
        self.cfg, self.filter, self.target = cfg, cfg.algorithm.filter, cfg.trainer.prompts_per_step
        self.source, self.reward, self.needs, self.warn = source, reward, needs, Seldom(warn)

    def collect(self, step: int, phase: Phase) -> Collected:
        """One round, or as many as the filter asks for and allows."""
        scored: list[Scored] = []
        rounds, overlapped, prompts = 0, 0.0, self.source.planned(step)
        before, scores = self.source.counts(), EarlyScores(self.asks)
        while prompts:
            with EarlyRewards(self.reward) as early:
                groups = self._sample(step, prompts, len(scored), (early, scores), phase)
                scored += self._score(groups, early, phase)
            overlapped += early.overlapped
            rounds += 1
            prompts = self._refill(step, rounds, scored)
        kept = [i for i, s in enumerate(scored) if s.kept][: self.target]
        self._check_full(step, rounds, len(kept), len(scored))
        metrics = self._metrics(rounds, len(kept), scored).sum("perf/reward_overlap", overlapped)
        for name, count in self.source.counts().items():
            metrics.sum(f"rollout/{name}", float(count - before.get(name, 0)))
        self._retire(step, scored, metrics)
        rewards = Rewards.concat([s.rewards for s in scored])
        trajectories = [t for s in scored for t in s.group.samples]
        metrics = Metrics.merge([reward_metrics(rewards, trajectories), metrics])
        batch = self._pack(scored, kept, rewards).with_(**scores.columns(kept))
        return Collected(batch, trajectories, rewards, metrics)

    def _sample(
        self, step: int, prompts: Sequence[int], first: int, early: tuple[EarlyRewards, EarlyScores], phase: Phase
    ) -> list[Group]:
        """One group a prompt, in order; on the way each goes to the early rewards and scores as soon as it is done."""
        groups: dict[int, Group] = {}
        rewards, scores = early
        scores.begin(range(first, first + len(prompts)))
        with phase("rollout"), closing(self.source.sample(step, prompts, first_group=first)) as finished:
            for done in finished:
                rewards.put(done)
                scores.put({first + place: group for place, group in done.items()})
                groups |= done
        return [groups[place] for place in range(len(prompts))]

    def _score(self, groups: Sequence[Group], early: EarlyRewards, phase: Phase) -> list[Scored]:
        """All responses, the greedy ones too. A reward model reads them here, not earlier: it wants what decodes."""
        flat = [t for group in groups for t in group.row]
        judged = None
        if self.reward.model is not None:
            with phase("reward_model"):
                judged = self.reward.judge(flat)
        with phase("reward"):
            plain = self.reward.compose(flat, judged, early.take())
            rewards = self._shaped(plain, flat)
        out, start = [], 0
        for group in groups:
            mine = range(start, start + len(group.samples))
            own = rewards.take(mine)
            kept = keeps(group.samples, [plain.total[i] for i in mine], own, self.filter)
            out.append(Scored(group, own, kept, None if group.greedy is None else rewards.total[mine.stop]))
            start += len(group.row)
        return out

    def _shaped(self, rewards: Rewards, trajectories: Sequence[Trajectory]) -> Rewards:
        """With the soft length limit of training, where it is on."""
        if self.cfg.reward.overlong.buffer == 0:
            return rewards
        lengths = [t.response_length for t in trajectories]
        longest = self.cfg.rollout.max_response_tokens
        return rewards.with_part(OVERLONG, overlong(lengths, longest, self.cfg.reward.overlong))

    def _refill(self, step: int, rounds: int, scored: Sequence[Scored]) -> list[int]:
        """The prompts of the next round: as many as fill the step if the share kept so far stays; none where it is
        full, rounds are used up, or the data has no more.
        """
        kept = sum(s.kept for s in scored)
        missing = self.target - kept
        if self.filter.constant_groups != "resample" or missing <= 0 or rounds >= self.filter.max_rounds:
            return []
        count = min(self.target, -(-missing * len(scored) // kept)) if kept else self.target
        return self.source.more(step, rounds, count, (s.group.index for s in scored))

    def _check_full(self, step: int, rounds: int, kept: int, sampled: int) -> None:
        """Say, or stop, where resampling did not fill the step."""
        if self.filter.constant_groups != "resample" or kept >= self.target:
            return
        spent = "" if rounds >= self.filter.max_rounds else ", and the data has no more"
        said = (
            f"only {kept} of {self.target} prompts have samples that differ in {self.filter.metric!r}, after {rounds} "
            f"round{'s' * (rounds > 1)} with {sampled} prompts{spent}"
        )
        knobs = (
            "raise algorithm.filter.max_rounds, rollout.n or rollout.sampling.temperature, give prompts that are "
            "neither too easy nor too hard, or set algorithm.filter.constant_groups=drop"
        )
        if self.filter.when_short == "stop":
            raise VerlError(f"step {step}: {said}; {knobs}, or algorithm.filter.when_short=continue")
        self.warn("short", step, f"{said}; going on with these; {knobs}")

    def _metrics(self, rounds: int, kept: int, scored: Sequence[Scored]) -> Metrics:
        greedy = [s.greedy for s in scored if s.greedy is not None]
        out = Metrics().sum("rollout/responses", float(len(greedy) + sum(len(s.group.samples) for s in scored)))
        if greedy:
            out.mean("reward/greedy", sum(greedy), float(len(greedy)))
        if self.filter.constant_groups != "keep":
            out.mean("filter/kept", float(sum(s.kept for s in scored)), float(len(scored)))
            out.mean("filter/rounds", float(rounds), 1.0)
        if self.filter.constant_groups == "resample":
            out.sum("filter/short", float(self.target - kept))
        return out

    def _retire(self, step: int, scored: Sequence[Scored], metrics: Metrics) -> None:
        """Prompts that are solved are not sampled in later steps."""
        if self.filter.retire_pass_rate is None:
            return
        enough = self.source.enough
        self.source.retired |= {s.group.index for s in scored if solved(s.rewards, self.filter)}
        metrics.mean("filter/retired", float(len(self.source.retired)), 1.0)
        if enough and not self.source.enough:
            self.warn(
                "retired",
                step,
                f"{len(self.source.retired)} of {len(self.source.prompts)} prompts are retired (pass rate of at least "
                f"{self.filter.retire_pass_rate:g}) and the others do not fill a step: all are sampled again; give "
                "more or harder prompts, or raise algorithm.filter.retire_pass_rate",
            )

    def _pack(self, scored: Sequence[Scored], kept: Sequence[int], rewards: Rewards) -> Batch:
        """The batch of the kept groups, with the reward columns that the algorithm reads."""
        trajectories = [t for i in kept for t in scored[i].group.samples]
        n = self.source.n
        mine = rewards.take(i * n + k for i in kept for k in range(n))
        cols: dict[str, Tensor] = {
            "reward": torch.tensor(mine.total, dtype=torch.float32),
            "excluded": torch.tensor([not counts(t, self.filter) for t in trajectories], dtype=torch.bool),
        }
        if "greedy_reward" in self.needs:
            greedy = [scored[i].greedy for i in kept for _ in range(n)]
            cols["greedy_reward"] = torch.tensor(greedy, dtype=torch.float32)
        if "reward_parts" in self.needs:
            parts = torch.tensor(list(mine.parts.values()), dtype=torch.float32).T
            weights = torch.tensor([mine.weights[name] for name in mine.parts], dtype=torch.float32)
            cols |= {"reward_parts": parts.contiguous(), "reward_weights": weights.expand(len(parts), -1).contiguous()}
        return Batch.of(trajectories).with_(**cols)
