"""GMPO: the geometric mean of a sequence's token ratios."""

from __future__ import annotations

import torch
from pydantic import Field

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss
from verl.algos.policy_losses.report import ratio_metrics
from verl.config.base import Section


class GeoMean(Section):
    """Constants of geo_mean. Both bounds are on the log of a token's ratio, so the range is wider than PPO's."""

    clip_low: float = Field(0.4, gt=0)
    """Where A < 0 the log-ratio of a token counts as no lower than -clip_low."""
    clip_high: float = Field(0.4, gt=0)
    """Where A > 0 the log-ratio of a token counts as no higher than clip_high."""


@POLICY_LOSSES.register("geo_mean", needs=("old_logprobs",), config=GeoMean)
def geo_mean(x: PolicyInputs, c: GeoMean) -> PolicyLoss:
    """-mean(A) exp(mean of d') at each token, both means over its sequence (GMPO, arXiv:2507.20673).

    d = l - lo; d' = sgn(A) min(sgn(A) d, sgn(A) clamp(d, -clip_low, clip_high)). With seq_mean_token_mean it is the
    paper's mean over sequences. The mean of d' is taken within [-20, 20].
    """
    s = x.segments
    gap, advantage = s.zero(x.logprobs - x.old_logprobs), s.zero(x.advantages)
    sign = advantage.sign()
    free, clipped = sign * gap, sign * gap.clamp(-c.clip_low, c.clip_high)
    mean = s.mean_per_seq(sign * torch.minimum(free, clipped)).clamp(-20.0, 20.0)
    return s.spread(-s.mean_per_seq(advantage) * mean.exp()), ratio_metrics(x, clipped < free)
