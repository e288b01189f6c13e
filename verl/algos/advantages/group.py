"""Credit by comparing the samples of a prompt: one score a sample, the same advantage at each of its tokens."""

from __future__ import annotations

from verl.algos.advantages.inputs import ADVANTAGES, Credit, CreditInputs, Groups
from verl.config.base import Section


class GRPO(Section):
    """Constants of grpo."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation; off is Dr.GRPO (arXiv:2503.20783)."""


@ADVANTAGES.register("grpo", needs=("group_id",), config=GRPO)
def grpo(x: CreditInputs, c: GRPO) -> Credit:
    """Group-relative advantage (arXiv:2402.03300, section 4.1.2): (s - mean of the group) / (std + 1e-6), std unbiased.

    Samples without a counted token leave the group's statistics. A group of one keeps mean 0 and std 1.
    """
    s = x.segments
    score, groups = s.sum_per_seq(x.rewards), Groups.of(x.group, s.counts > 0)
    advantage = score - groups.mean(score)
    return s.spread(advantage / (groups.std(score) + 1e-6) if c.normalize_by_std else advantage), None
