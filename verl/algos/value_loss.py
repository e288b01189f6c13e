"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algos.segments import Segments
from verl.core.metrics import Metrics


def value_loss(
    segments: Segments, values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Metrics]:
    """1/2 max((V - R)^2, (clip(V, Vold - c, Vold + c) - R)^2), [T], 0 where the mask is 0.

    values [T] carries the gradient; old_values and returns [T] do not. Source: the PPO reference implementation
    (arXiv:1707.06347, eq. 9, with the clip of its code).
    """
    s = segments
    v, old, target = s.zero(values), s.zero(old_values), s.zero(returns)
    near = torch.minimum(torch.maximum(v, old - clip), old + clip)
    free, clipped = (v - target) ** 2, (near - target) ** 2
    n = float(s.mask.sum())
    metrics = Metrics()
    metrics.mean("critic/clip_fraction", float((s.mask & (clipped > free)).sum()), n)
    metrics.mean("critic/value", float(v.detach().sum()), n)
    metrics.mean("critic/return", float(target.sum()), n)
    metrics.mean("critic/error", float(((v.detach() - target) ** 2).sum()), n)
    return s.zero(0.5 * torch.maximum(free, clipped)), metrics
