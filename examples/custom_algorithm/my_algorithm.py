"""A new advantage and a new policy loss, from outside the package. Used by name in config.yaml beside this file."""

from pydantic import Field
from torch import Tensor

from verl.algos.advantages import ADVANTAGES, Credit, CreditInputs, Groups
from verl.algos.policy_losses import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.config import Section
from verl.core.metrics import Metrics


class Capped(Section):
    """Constants of capped_group."""

    scale: float = Field(1.0, gt=0)
    """Advantages are multiplied by this."""


@ADVANTAGES.register("capped_group", needs=("group_id",), config=Capped)
def capped_group(x: CreditInputs, c: Capped) -> Credit:
    """Score less the mean of the group, in units of the group's standard deviation, never below -1."""
    s = x.segments
    score, groups = s.sum_per_seq(x.rewards), Groups.of(x.group, s.counts > 0)
    gap: Tensor = (score - groups.mean(score)) / (groups.std(score) + 1e-6)
    return s.spread(c.scale * gap.clamp(min=-1.0)), None


@POLICY_LOSSES.register("unclipped", needs=("old_logprobs",))
def unclipped(x: PolicyInputs, _: None) -> PolicyLoss:
    """-A rho: PPO's surrogate without any clip."""
    loss = -x.segments.zero(x.advantages) * log_ratio(x).exp()
    return x.segments.zero(loss), Metrics()
