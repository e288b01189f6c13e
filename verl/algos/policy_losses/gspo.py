"""GSPO: the ratio of a whole sequence in place of each token's own."""

from __future__ import annotations

from pydantic import Field

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss
from verl.algos.policy_losses.report import ratio_metrics
from verl.algos.policy_losses.surrogate import clipped_surrogate
from verl.config.base import Section

LOG_RATIO_CAP = 10.0
"""Above this the log of a sequence's ratio is cut, so that its exponential is finite."""


class GSPO(Section):
    """Constants of gspo. A mean over a sequence moves far less than one token's ratio, hence the narrow range."""

    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The ratio of the sequence is cut below 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0)
    """The ratio of the sequence is cut above 1 + clip_high."""


@POLICY_LOSSES.register("gspo", needs=("old_logprobs",), config=GSPO)
def gspo(x: PolicyInputs, c: GSPO) -> PolicyLoss:
    """max(-A s, -A clamp(s, 1 - clip_low, 1 + clip_high)) with s = exp(l - sg(l) + sg(mean of l - lo in the sequence)).

    arXiv:2507.18071, section 4.3 (GSPO-token): in value s is the sequence's ratio of eq. 7, to the power of one over
    its length; each token carries its own gradient. With one advantage a sequence and seq_mean_token_mean it is the
    objective of eq. 5. The log of s is at most 10.
    """
    seg = x.segments
    now = seg.zero(x.logprobs)
    mean = seg.spread(seg.mean_per_seq((x.logprobs - x.old_logprobs).detach()))
    ratio = (now - now.detach() + mean).clamp(max=LOG_RATIO_CAP).exp()
    loss, cut = clipped_surrogate(seg.zero(x.advantages), ratio, c.clip_low, c.clip_high)
    return seg.zero(loss), ratio_metrics(x, cut)
