"""Rollout correction on padded tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.algos.correction import check_correction, effective_sample_size, importance_weights, kept, mismatch
from verl.algos.functional.padded import Padded
from verl.algos.segments import Segments
from verl.config.algorithm import CorrectionConfig
from verl.config.loader import check


def rollout_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(weights [B, T], mask [B, T] bool, metrics): corrects for a sampler whose law was not quite the trainer's.

    old_logprobs [B, T]: of the trainer before the update. rollout_logprobs [B, T]: as the sampler reported them.
    Multiply the token losses by the weights (`policy_loss(..., rollout_weights=weights, mask=mask)`); the mask returned
    has the rejected tokens off, so that they leave numerator and denominator, weights included.

    options, as in `algorithm.rollout_correction`: level "token" (default), "sequence" or "off"; kind "tis" with cap, or
    "icepop" with low and high; normalize; reject "off", "token", "sequence_sum", "sequence_mean" or "sequence_max" with
    statistic "k1", "k2" or "k3", reject_low and reject_high.
    metrics: rollout/logprob_gap (mean), rollout/logprob_gap_max, rollout/k3, rollout/ess (effective sample size of the
    token weights, 1 is best) over the mask given, and rollout/rejected, the share of its tokens that left.
    """
    cfg = check(CorrectionConfig, {"level": "token", **options}, "rollout_weights")
    check_correction(cfg, "rollout_weights")
    pad = Padded.of("rollout_weights", mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    s = pad.segments
    old = pad.tokens("old_logprobs", old_logprobs).detach()
    rollout = pad.tokens("rollout_logprobs", rollout_logprobs).detach()
    keep = kept(s, old, rollout, cfg)
    weights = importance_weights(Segments(s.seq, keep, s.num_seqs), old, rollout, cfg)
    partials = mismatch(s, old, rollout)
    partials.mean("rollout/rejected", float((s.mask & ~keep).sum()), float(s.mask.sum()))
    return pad.padded(weights), pad.padded(keep), _shown(partials.values_by_name())


def _shown(values: dict[str, float]) -> dict[str, float]:
    size = effective_sample_size(values)
    out = {name: value for name, value in values.items() if not name.startswith("rollout/weight")}
    return out if size is None else {**out, "rollout/ess": size}
