"""From trajectories to rewards: the reward model's scores and the user's functions, composed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl.core.metrics import Metrics
from verl.core.trajectory import Trajectory
from verl.rewards.composer import Parts, RewardComposer, Rewards
from verl.workers.reward_model import Scores


class RewardScorer:
    """model: the reward model, or None; composer: verifier and functions with their weights.

    early: names of the parts that `score_early` may be asked for, in another thread, before the others.
    """

    def __init__(self, composer: RewardComposer, model: Scores | None = None, early: frozenset[str] = frozenset()):
        self.composer, self.model, self.early = composer, model, early

    @property
    def cut(self) -> int:
        """How many texts so far were longer than the reward model reads."""
        return self.model.truncated if self.model is not None else 0

    def score(self, trajectories: Sequence[Trajectory]) -> Rewards:
        return self.compose(trajectories, self.judge(trajectories), {})

    def judge(self, trajectories: Sequence[Trajectory]) -> Sequence[float] | None:
        """The reward model's scores."""
        if self.model is None:
            return None
        return self.model.score([(t.prompt.messages, t.response_text) for t in trajectories])

    def score_early(self, trajectories: Sequence[Trajectory]) -> Parts:
        """Values of the early parts."""
        prompts, responses = [t.prompt for t in trajectories], [t.response_text for t in trajectories]
        return self.composer.parts(prompts, responses, self.early)

    def compose(self, trajectories: Sequence[Trajectory], judged: Sequence[float] | None, early: Parts) -> Rewards:
        """All parts in one: what `judge` and `score_early` said of these trajectories, and those that are missing."""
        prompts, responses = [t.prompt for t in trajectories], [t.response_text for t in trajectories]
        return self.composer.score(prompts, responses, judged, early)


def reward_metrics(rewards: Rewards, trajectories: Sequence[Trajectory], prefix: str = "") -> Metrics:
    """Mean and spread of the total and mean of every part; lengths and how responses ended."""
    total, n = np.asarray(rewards.total, dtype=np.float64), float(len(rewards.total))
    out = Metrics().mean(f"{prefix}reward", float(total.sum()), n)
    out.mean(f"{prefix}reward/std", float(total.std()), 1.0)
    for name, values in rewards.parts.items():
        out.mean(f"{prefix}reward/{name}", float(np.sum(values)), n)
    lengths = [t.response_length for t in trajectories]
    out.mean(f"{prefix}response/length", float(sum(lengths)), n).max(
        f"{prefix}response/length_max", float(max(lengths))
    )
    return out.mean(f"{prefix}response/truncated", float(sum(t.finish == "length" for t in trajectories)), n)
