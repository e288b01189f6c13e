"""PPO's clipped surrogate."""

from __future__ import annotations

import torch
from pydantic import Field

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.config.base import Section
from verl.core.metrics import Metrics


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
    """Clipped surrogate (arXiv:1707.06347, eq. 7) with an optional dual clip."""
    s = x.segments
    advantage = s.zero(x.advantages)
    ratio = log_ratio(x).exp()
    free = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high)
    loss = torch.maximum(free, clipped)
    weight = float(s.mask.sum())
    metrics = Metrics().mean("actor/clip_fraction", float((s.mask & (clipped > free)).sum()), weight)
    if c.dual_clip is not None:
        bound = -advantage * c.dual_clip
        hit = s.mask & (advantage < 0) & (loss > bound)
        loss = torch.where(hit, bound, loss)
        metrics.mean("actor/dual_clip_fraction", float(hit.sum()), weight)
    metrics.mean("actor/approx_kl", float(s.zero((x.old_logprobs - x.logprobs).detach()).sum()), weight)
    return s.zero(loss), metrics
