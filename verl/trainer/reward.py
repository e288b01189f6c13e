"""From trajectories to rewards: the reward model's scores and the user's functions, composed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl.core.metrics import Metrics
from verl.core.trajectory import Trajectory
from verl.models.reward_model import RewardModel
from verl.rewards.composer import RewardComposer, Rewards


class RewardScorer:
    """model: the reward model, or None; composer: verifier and functions with their weights."""

    def __init__(self, composer: RewardComposer, model: RewardModel | None = None):
        self.composer, self.model = composer, model

    @property
    def cut(self) -> int:
        """How many texts so far were longer than the reward model reads."""
        return self.model.truncated if self.model is not None else 0

    def score(self, trajectories: Sequence[Trajectory]) -> Rewards:
        prompts = [t.prompt for t in trajectories]
        responses = [t.response_text for t in trajectories]
        scores = None
        if self.model is not None:
            scores = self.model.score([(p.messages, r) for p, r in zip(prompts, responses, strict=True)])
        return self.composer.score(prompts, responses, scores)


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
