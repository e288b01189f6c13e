"""DPPO: a trust region on the probability of a token in place of its ratio."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.algos.policy_losses.report import ratio_metrics, share
from verl.config.base import Section

CAP_DOC = """The weight is at most this (arXiv:2602.04879, section 5.4); null: no bound."""


class DPPOTV(Section):
    """Constants of dppo_tv."""

    clip_low: float = Field(0.2, gt=0, le=1)
    """Where A <= 0 a token whose probability has fallen by more than this has no gradient."""
    clip_high: float = Field(0.2, gt=0, le=1)
    """Where A > 0 a token whose probability has risen by more than this has no gradient."""
    dual_clip: float | None = Field(20.0, gt=1, description=CAP_DOC)


class DPPOKL(Section):
    """Constants of dppo_kl."""

    eps: float = Field(0.05, gt=0)
    """A token whose divergence is above this has no gradient, unless it leads back."""
    dual_clip: float | None = Field(20.0, gt=1, description=CAP_DOC)


@POLICY_LOSSES.register("dppo_tv", needs=("old_logprobs",), config=DPPOTV)
def dppo_tv(x: PolicyInputs, c: DPPOTV) -> PolicyLoss:
    """-A sg(min(rho, dual_clip)) l where p - po <= clip_high (A > 0) or p - po >= -clip_low (else); 0 elsewhere.

    p and po: probability of the token now and before the update, the total variation of the choice between this token
    and any other (arXiv:2602.04879, the binary approximation).
    """
    now, old = _detached(x)
    move = now.exp() - old.exp()
    valid = torch.where(x.segments.zero(x.advantages) > 0, move <= c.clip_high, move >= -c.clip_low)
    return _weighted(x, valid, c.dual_clip)


@POLICY_LOSSES.register("dppo_kl", needs=("old_logprobs",), config=DPPOKL)
def dppo_kl(x: PolicyInputs, c: DPPOKL) -> PolicyLoss:
    """-A sg(min(rho, dual_clip)) l where KL <= eps, or the step leads back (A > 0 and p <= po, A < 0 and p >= po).

    KL = po (lo - l) + (1 - po) log((1 - po) / (1 - p)): of the choice between this token and any other, before the
    update against now (arXiv:2602.04879, the binary approximation). 1 - p is at least 1e-12 inside the log.
    """
    now, old = _detached(x)
    advantage = x.segments.zero(x.advantages)
    kl = old.exp() * (old - now) - old.expm1() * (_log_rest(old) - _log_rest(now))
    back = ((advantage > 0) & (now <= old)) | ((advantage < 0) & (now >= old))
    return _weighted(x, (kl <= c.eps) | back, c.dual_clip)


def _detached(x: PolicyInputs) -> tuple[Tensor, Tensor]:
    return x.segments.zero(x.logprobs.detach()), x.segments.zero(x.old_logprobs)


def _log_rest(logprob: Tensor) -> Tensor:
    """log(1 - p)."""
    return (-logprob.expm1()).clamp(min=1e-12).log()


def _weighted(x: PolicyInputs, valid: Tensor, cap: float | None) -> PolicyLoss:
    """REINFORCE weighted by the ratio, at most `cap`, on the tokens inside the trust region."""
    s = x.segments
    advantage = s.zero(x.advantages)
    weight = log_ratio(x).detach().exp()
    metrics = ratio_metrics(x, ~valid & (advantage != 0))
    if cap is not None:
        metrics.mean("actor/dual_clip_fraction", *share(x, valid & (weight > cap) & (advantage != 0)))
        weight = weight.clamp(max=cap)
    return torch.where(valid, -advantage * weight * s.zero(x.logprobs), torch.zeros_like(advantage)), metrics
