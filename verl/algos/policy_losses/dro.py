"""DRO: a quadratic pull to the policy before the update in place of the clip."""

from __future__ import annotations

from pydantic import Field

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss
from verl.algos.policy_losses.report import ratio_metrics
from verl.config.base import Section


class DRO(Section):
    """Constants of dro."""

    beta: float = Field(0.05, gt=0)
    """Strength of the pull: a token's log-prob rests where it has moved by A / beta."""


@POLICY_LOSSES.register("dro", needs=("old_logprobs",), config=DRO)
def dro(x: PolicyInputs, c: DRO) -> PolicyLoss:
    """-(A l - beta / 2 (l - lo)^2) (arXiv:2405.19107; the policy's part with the advantage given)."""
    s = x.segments
    gap = s.zero(x.logprobs - x.old_logprobs)
    return 0.5 * c.beta * gap * gap - s.zero(x.advantages) * s.zero(x.logprobs), ratio_metrics(x)
