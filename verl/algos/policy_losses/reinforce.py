"""Losses without a ratio: the plain policy gradient."""

from __future__ import annotations

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss
from verl.core.metrics import Metrics


@POLICY_LOSSES.register("reinforce")
def reinforce(x: PolicyInputs, c: None) -> PolicyLoss:
    """-A l (Williams 1992, Machine Learning 8, section 4).

    Exact for one update a batch; what the sampler's law differs by is corrected by the weight of
    `algorithm.rollout_correction`, which multiplies this loss like every other.
    """
    return -x.segments.zero(x.advantages) * x.segments.zero(x.logprobs), Metrics()


@POLICY_LOSSES.register("gpg")
def gpg(x: PolicyInputs, c: None) -> PolicyLoss:
    """-A l: no ratio, no clip, no reference (arXiv:2504.02546).

    What sets GPG apart is its advantage of the same name; the loss is that of reinforce.
    """
    return reinforce(x, c)
