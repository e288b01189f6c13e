"""Credit by comparing the samples of a prompt: one score a sample, the same advantage at each of its tokens.

The score of a sample is the sum of its token rewards. Samples without a counted token are in no statistic and get 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algos.advantages.inputs import ADVANTAGES, Credit, CreditInputs, Groups
from verl.config.base import Section

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, so that equal scores give 0 and not 0/0."""


class GRPO(Section):
    """Constants of grpo."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation; off is Dr.GRPO (arXiv:2503.20783)."""


def scores(x: CreditInputs) -> tuple[Tensor, Groups]:
    """([N] score of each sample, the groups of the counted samples)."""
    s = x.segments
    return s.sum_per_seq(x.rewards), Groups.of(x.group, s.counts > 0)


def standardised(score: Tensor, groups: Groups) -> Tensor:
    """[N] -> [N] (s - mean of the group) / (std of the group + 1e-6)."""
    return (score - groups.mean(score)) / (groups.std(score) + STD_FLOOR)


@ADVANTAGES.register("grpo", needs=("group_id",), config=GRPO)
def grpo(x: CreditInputs, c: GRPO) -> Credit:
    """A = (s - mean of the group) / (std of the group + 1e-6), std unbiased (arXiv:2402.03300, section 4.1.2).

    normalize_by_std off: A = s - mean of the group. A group of one keeps mean 0 and std 1.
    """
    score, groups = scores(x)
    advantage = standardised(score, groups) if c.normalize_by_std else score - groups.mean(score)
    return x.segments.spread(advantage), None


@ADVANTAGES.register("rloo", needs=("group_id",))
def rloo(x: CreditInputs, c: None) -> Credit:
    """Leave-one-out: A = s - mean of the group's others = n / (n - 1) (s - mean of the group) (arXiv:2402.14740).

    A group of one gets 0.
    """
    score, groups = scores(x)
    n = groups.size(score.dtype)[groups.place]
    advantage = n / (n - 1).clamp(min=1) * (score - groups.mean(score))
    return x.segments.spread(torch.where(groups.alone(), torch.zeros_like(score), advantage)), None


@ADVANTAGES.register("opo", needs=("group_id",))
def opo(x: CreditInputs, c: None) -> Credit:
    """A = s - sum(len s) / sum(len) over the group, len = counted tokens of a sample (arXiv:2505.23585).

    A group of one has baseline 0.
    """
    score, groups = scores(x)
    length = x.segments.counts.to(score.dtype)
    # Distances from the mean, so that equal scores give exactly 0.
    gap = score - groups.mean(score)
    shift = (groups.sum(length * gap) / groups.sum(length).clamp(min=1))[groups.place]
    return x.segments.spread(torch.where(groups.alone(), score, gap - shift)), None


@ADVANTAGES.register("reinforce_pp_baseline", needs=("group_id",))
def reinforce_pp_baseline(x: CreditInputs, c: None) -> Credit:
    """A = whiten(s - mean of the group) over the counted tokens of the whole batch (REINFORCE++, arXiv:2501.03262).

    A group of one has mean 0.
    """
    score, groups = scores(x)
    return x.segments.whiten(x.segments.spread(score - groups.mean(score))), None


@ADVANTAGES.register("gpg", needs=("group_id",))
def gpg(x: CreditInputs, c: None) -> Credit:
    """A = B / max(1, samples with s != 0) (s - mean of the group), B = counted samples of the batch (arXiv:2504.02546).

    A group of one has mean 0.
    """
    score, groups = scores(x)
    rewarded = (groups.counted & (score != 0)).sum().clamp(min=1).to(score.dtype)
    return x.segments.spread(groups.counted.sum() / rewarded * (score - groups.mean(score))), None


@ADVANTAGES.register("grpo_passk", needs=("group_id",))
def grpo_passk(x: CreditInputs, c: None) -> Credit:
    """Only the best sample of a group: A = (largest s - second largest s) / (std of the group + 1e-6); the others 0.

    For pass@k (arXiv:2503.19595). The best of a tie gets 0, as the second is as good. A group of one gets 0.
    """
    score, groups = scores(x)
    first, second = (v[groups.place] for v in groups.top_two(score, -torch.inf))
    best = (score == first) & ~groups.alone()
    lead = (first - second) / (groups.std(score) + STD_FLOOR)
    return x.segments.spread(torch.where(best, lead, torch.zeros_like(score))), None


@ADVANTAGES.register("gdpo", needs=("group_id", "reward_parts", "reward_weights"))
def gdpo(x: CreditInputs, c: None) -> Credit:
    """A = whiten(sum over k of w_k (r_k - mean of the group) / (std of the group + 1e-6)) (arXiv:2601.05242).

    r_k: component k of the reward, w_k its weight; each component has its own group statistics, and whitening is over
    the counted tokens of the whole batch. Reads the components, not `rewards`. A group of one keeps mean 0 and std 1.
    """
    assert x.reward_parts is not None and x.reward_weights is not None
    groups = Groups.of(x.group, x.segments.counts > 0)
    parts = [standardised(part, groups) for part in x.reward_parts.unbind(1)]
    total = (torch.stack(parts, 1) * x.reward_weights).sum(1)
    return x.segments.whiten(x.segments.spread(total)), None
