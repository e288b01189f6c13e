"""PPO's clipped surrogate."""

from __future__ import annotations

import torch
from pydantic import Field

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.algos.policy_losses.report import ratio_metrics, share
from verl.algos.policy_losses.surrogate import clipped_surrogate
from verl.config.base import Section


class PPOClip(Section):
    """Constants of ppo_clip."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is cut below 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is cut above 1 + clip_high."""
    dual_clip: float | None = Field(3.0, gt=1)
    """For negative advantages the loss is at most -A times this (arXiv:1912.09729, eq. 5); null turns it off."""


@POLICY_LOSSES.register("ppo_clip", needs=("old_logprobs",), config=PPOClip)
def ppo_clip(x: PolicyInputs, c: PPOClip) -> PolicyLoss:
    """max(-A rho, -A clamp(rho, 1 - clip_low, 1 + clip_high)) (arXiv:1707.06347, eq. 7).

    For A < 0 at most -A dual_clip (arXiv:1912.09729, eq. 5). clip_high above clip_low is DAPO's clip-higher
    (arXiv:2503.14476, section 3.1).
    """
    s = x.segments
    advantage = s.zero(x.advantages)
    loss, cut = clipped_surrogate(advantage, log_ratio(x).exp(), c.clip_low, c.clip_high)
    metrics = ratio_metrics(x, cut)
    if c.dual_clip is not None:
        bound = -advantage * c.dual_clip
        hit = (advantage < 0) & (loss > bound)
        loss = torch.where(hit, bound, loss)
        metrics.mean("actor/dual_clip_fraction", *share(x, hit))
    return s.zero(loss), metrics
