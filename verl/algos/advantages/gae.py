"""Credit through a critic."""

from __future__ import annotations

import torch
from pydantic import Field

from verl.algos.advantages.inputs import ADVANTAGES, Credit, CreditInputs
from verl.config.base import Section


class GAE(Section):
    """Constants of gae."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of a token step."""
    lam: float = Field(0.95, ge=0, le=1)
    """Trade of bias (0) for variance (1)."""


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
