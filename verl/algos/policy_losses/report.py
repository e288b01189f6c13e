"""What every loss with a ratio reports, in one place."""

from __future__ import annotations

from torch import Tensor

from verl.algos.policy_losses.inputs import PolicyInputs
from verl.core.metrics import Metrics


def share(x: PolicyInputs, which: Tensor) -> tuple[float, float]:
    """(how many counted tokens are in `which` [T] bool, how many are counted): the partial of their share."""
    mask = x.segments.mask
    return float((mask & which).sum()), float(mask.sum())


def ratio_metrics(x: PolicyInputs, cut: Tensor | None = None) -> Metrics:
    """actor/approx_kl: mean of old less new log-prob; actor/clip_fraction: share of counted tokens in `cut` [T] bool,
    those whose gradient the loss cuts, left out where a loss cuts none.
    """
    gap = x.segments.zero((x.old_logprobs - x.logprobs).detach())
    metrics = Metrics().mean("actor/approx_kl", float(gap.sum()), float(x.segments.mask.sum()))
    return metrics if cut is None else metrics.mean("actor/clip_fraction", *share(x, cut))
