"""PPO's pessimistic choice between a ratio and the same ratio clipped."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(advantage: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """([T] max(-A rho, -A clamp(rho, 1 - low, 1 + high)); [T] bool: where the clip cuts the gradient).

    arXiv:1707.06347, eq. 7. The clip cuts only where it makes the objective worse: a ratio that left the range against
    the advantage keeps its gradient.
    """
    free = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, clipped), clipped > free
