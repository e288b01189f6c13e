"""Advantage estimators: who gets credit for the reward. Registered by name; each has a numpy twin in tests/reference.
Advantage estimators: who gets credit for the reward. Registered by name; each has a numpy twin in tests/reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from verl.algos.segments import Segments
from verl.config.base import Section
from verl.core.registry import Registry


@dataclass(frozen=True)
class CreditInputs:
    """What an estimator may read. rewards [T]: token rewards; values [T]: the critic's; group [N]: prompt of a sample.
    What an estimator may read. rewards [T]: token rewards; values [T]: the critic's; group [N]: prompt of a sample.
    """

    segments: Segments
    rewards: Tensor
    group: Tensor
    values: Tensor | None = None


Credit = tuple[Tensor, Tensor | None]
"""(advantages [T], returns [T] or None); both 0 where the mask is 0."""
AdvantageFn = Callable[[CreditInputs, "GAE | GRPO"], Credit]
ADVANTAGES: Registry[Callable[..., Credit]] = Registry("algorithm.advantage")


class GAE(Section):
    """Constants of gae."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of a token step."""
    lam: float = Field(0.95, ge=0, le=1)
    """Trade of bias (0) for variance (1)."""


class GRPO(Section):
    """Constants of grpo."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation; off is Dr.GRPO (arXiv:2503.20783)."""


@ADVANTAGES.register("gae", needs=("values",), config=GAE)
def gae(x: CreditInputs, c: GAE) -> Credit:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), whitened over the batch.

    Masked tokens (tool observations) are skipped with no discount. returns = A + V, before whitening.
    """
    assert x.values is not None
    s = x.segments
    reward, value, counts = s.dense(x.rewards), s.dense(x.values), s.counts
    advantage = torch.zeros_like(reward)
    follow = torch.zeros_like(counts, dtype=reward.dtype)
    carried = torch.zeros_like(follow)
    for k in range(reward.shape[1] - 1, -1, -1):
        inside = k < counts
        delta = reward[:, k] + c.gamma * follow - value[:, k]
        carried = torch.where(inside, delta + c.gamma * c.lam * carried, torch.zeros_like(carried))
        follow = torch.where(inside, value[:, k], torch.zeros_like(follow))
        advantage[:, k] = carried
    return s.whiten(s.flat(advantage)), s.flat(advantage + value)


@ADVANTAGES.register("grpo", needs=("group_id",), config=GRPO)
def grpo(x: CreditInputs, c: GRPO) -> Credit:
    """Group-relative advantage (arXiv:2402.03300, section 4.1.2): (s - mean of the group) / (std + 1e-6), std unbiased.

    Samples without a counted token leave the group's statistics. A group of one keeps mean 0 and std 1.
    """
    s = x.segments
    score = s.sum_per_seq(x.rewards)
    counted = s.counts > 0
    mean, std = group_statistics(score, x.group, counted)
    advantage = score - mean
    return s.spread(advantage / (std + 1e-6) if c.normalize_by_std else advantage), None


def group_statistics(score: Tensor, group: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """[N] mean and unbiased standard deviation of each sample's group, over counted samples; (0, 1) in a group of one.
    [N] mean and unbiased standard deviation of each sample's group, over counted samples; (0, 1) in a group of one.
    """
    _, place = torch.unique(group, return_inverse=True)
    groups = int(place.max()) + 1 if len(place) else 0
    zero = torch.zeros(groups, dtype=score.dtype, device=score.device)
    kept = torch.where(counted, score, torch.zeros_like(score))
    n = zero.index_add(0, place, counted.to(score.dtype))
    mean = zero.index_add(0, place, kept) / n.clamp(min=1)
    gap = torch.where(counted, score - mean[place], torch.zeros_like(score))
    std = (zero.index_add(0, place, gap**2) / (n - 1).clamp(min=1)).sqrt()
    alone = n < 2
    return torch.where(alone, torch.zeros_like(mean), mean)[place], torch.where(alone, torch.ones_like(std), std)[place]
