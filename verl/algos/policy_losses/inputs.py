"""What a policy loss reads, what it returns, and where it is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from verl.algos.segments import Segments
from verl.core.metrics import Metrics
from verl.core.registry import Registry


@dataclass(frozen=True)
class PolicyInputs:
    """All [T]. logprobs carries the gradient; old_logprobs and advantages do not.

    chosen [T] bool: what the entry's `prepare` chose from the whole mini-batch, where it has one.
    """

    segments: Segments
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    chosen: Tensor | None = None


PolicyLoss = tuple[Tensor, Metrics]
"""(loss [T], 0 where the mask is 0; metrics as partials)."""
POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry("algorithm.policy_loss")


def log_ratio(x: PolicyInputs) -> Tensor:
    """log-prob now less log-prob then, [T], within [-20, 20] so that its exponential is finite; 0 where masked."""
    return x.segments.zero(x.logprobs - x.old_logprobs).clamp(-20.0, 20.0)
