"""Which groups and prompts still teach something."""

from __future__ import annotations

from collections.abc import Sequence

from verl.config.algorithm import FilterConfig
from verl.core.trajectory import Trajectory
from verl.rewards.composer import VERIFIER, Rewards


def counts(sample: Trajectory, cfg: FilterConfig) -> bool:
    """Whether a sample is trained on: it was not aborted, nor cut where `exclude_truncated` says so."""
    return sample.finish == "stop" or (sample.finish == "length" and not cfg.exclude_truncated)


def keeps(samples: Sequence[Trajectory], scores: Sequence[float], rewards: Rewards, cfg: FilterConfig) -> bool:
    """Whether a group is trained on: always, or where the metric differs among the samples that count.

    scores: the metric `score`, reward before shaping of lengths; rewards: with all parts.
    """
    if cfg.constant_groups == "keep":
        return True
    metric = scores if cfg.metric == "score" else rewards.parts[cfg.metric]
    counted = [value for value, sample in zip(metric, samples, strict=True) if counts(sample, cfg)]
    return bool(counted) and max(counted) > min(counted)


def solved(rewards: Rewards, cfg: FilterConfig) -> bool:
    """Whether a prompt is retired: its share of samples that passed the verifier reaches `retire_pass_rate`."""
    if cfg.retire_pass_rate is None:
        return False
    verdicts = rewards.parts[VERIFIER]
    return sum(v >= 1.0 for v in verdicts) / len(verdicts) >= cfg.retire_pass_rate
