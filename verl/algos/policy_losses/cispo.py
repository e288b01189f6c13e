"""CISPO: REINFORCE weighted by a clipped ratio, so that no token loses its gradient."""

from __future__ import annotations

from pydantic import Field

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.algos.policy_losses.report import ratio_metrics
from verl.config.base import Section


class CISPO(Section):
    """Constants of cispo."""

    clip_low: float = Field(1.0, gt=0, le=1)
    """The weight is at least 1 - clip_low; 1 is no lower bound, as in the paper."""
    clip_high: float = Field(4.0, gt=0)
    """The weight is at most 1 + clip_high."""


@POLICY_LOSSES.register("cispo", needs=("old_logprobs",), config=CISPO)
def cispo(x: PolicyInputs, c: CISPO) -> PolicyLoss:
    """-sg(clamp(rho, 1 - clip_low, 1 + clip_high)) A l (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    The paper has no lower bound and tunes the upper one alone; its default here is ours. The clip fraction counts
    tokens whose weight is clipped; their gradient is bounded, not cut off.
    """
    s = x.segments
    advantage = s.zero(x.advantages)
    ratio = log_ratio(x).detach().exp()
    weight = ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high)
    return -weight * advantage * s.zero(x.logprobs), ratio_metrics(x, (weight != ratio) & (advantage != 0))
