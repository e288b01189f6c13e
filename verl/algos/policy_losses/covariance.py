"""Clip-Cov and KL-Cov: a few tokens whose log-prob and advantage vary together are treated apart.

They are what makes entropy collapse (arXiv:2505.22617). Which they are is a statistic of the whole mini-batch, so it is
settled before any part of it is computed, and no split into parts changes the gradient.
"""

from __future__ import annotations

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.algos.policy_losses.report import ratio_metrics, share
from verl.algos.policy_losses.surrogate import clipped_surrogate
from verl.config.base import Section
from verl.core.rng import stream


class ClipCov(Section):
    """Constants of clip_cov."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is cut below 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is cut above 1 + clip_high."""
    cov_ratio: float = Field(2e-4, gt=0, le=1)
    """Share of the mini-batch's counted tokens that lose their gradient; one token at least."""
    cov_low: float = 1.0
    """Only tokens whose covariance is above this."""
    cov_high: float = Field(5.0, validate_default=True)
    """Only tokens whose covariance is below this."""

    @field_validator("cov_high")
    @classmethod
    def _above_low(cls, high: float, info: ValidationInfo) -> float:
        if "cov_low" in info.data and high <= info.data["cov_low"]:
            raise ValueError(f"must be above cov_low, which is {info.data['cov_low']}")
        return high


class KLCov(Section):
    """Constants of kl_cov."""

    cov_ratio: float = Field(2e-4, gt=0, le=1)
    """Share of the mini-batch's counted tokens that are held back; one token at least."""
    kl_coef: float = Field(0.1, gt=0)
    """Weight of |l - lo| on those tokens."""


def covariance(x: PolicyInputs) -> Tensor:
    """(A - mean A)(l - mean l) of each counted token, in flat order; means over all of them. Without gradient."""
    counted = x.segments.mask
    advantage, now = x.advantages[counted], x.logprobs.detach()[counted]
    return (advantage - advantage.mean()) * (now - now.mean())


def _number(share_of_tokens: float, tokens: int) -> int:
    return max(1, int(share_of_tokens * tokens))


def _mark(x: PolicyInputs, places: Tensor) -> Tensor:
    """[T] bool: 1 at `places`, which number the counted tokens."""
    mark = torch.zeros(int(x.segments.mask.sum()), dtype=torch.bool, device=places.device)
    mark[places] = True
    out = torch.zeros_like(x.segments.mask)
    out[x.segments.mask] = mark
    return out


def choose_clip_cov(x: PolicyInputs, c: ClipCov, seed: int) -> Tensor:
    """[T] bool: a random max(1, int(cov_ratio n)) of the tokens that the ratio's clip leaves alone and whose covariance
    is within the bounds, or all of these where they are fewer. n: counted tokens.

    Each counted token draws one number, in flat order, so padding changes no choice.
    """
    mask = x.segments.mask
    _, cut = clipped_surrogate(x.segments.zero(x.advantages), log_ratio(x).detach().exp(), c.clip_low, c.clip_high)
    cov = covariance(x)
    able = torch.nonzero(~cut[mask] & (cov > c.cov_low) & (cov < c.cov_high)).squeeze(1)
    draw = torch.from_numpy(stream(seed, "clip_cov").random(len(cov))).to(mask.device)
    order = torch.argsort(draw[able], stable=True)
    return _mark(x, able[order[: _number(c.cov_ratio, len(cov))]])


def choose_kl_cov(x: PolicyInputs, c: KLCov, seed: int) -> Tensor:
    """[T] bool: the max(1, int(cov_ratio n)) counted tokens of largest covariance, the earlier of equal ones.

    n: counted tokens; seed: nothing is random here.
    """
    cov = covariance(x)
    order = torch.argsort(cov, descending=True, stable=True)
    return _mark(x, order[: _number(c.cov_ratio, len(cov))])


@POLICY_LOSSES.register("clip_cov", needs=("old_logprobs",), config=ClipCov, prepare=choose_clip_cov)
def clip_cov(x: PolicyInputs, c: ClipCov) -> PolicyLoss:
    """max(-A rho, -A clamp(rho, 1 - clip_low, 1 + clip_high)), and 0 at the tokens chosen (arXiv:2505.22617, Clip-Cov).

    Chosen from the whole mini-batch: a random max(1, int(cov_ratio n)) of the tokens that the clip leaves alone with
    cov_low < (A - mean A)(l - mean l) < cov_high; n: its counted tokens. The clip fraction counts both kinds.
    """
    assert x.chosen is not None
    s = x.segments
    loss, cut = clipped_surrogate(s.zero(x.advantages), log_ratio(x).exp(), c.clip_low, c.clip_high)
    metrics = ratio_metrics(x, cut | x.chosen).mean("actor/cov_fraction", *share(x, x.chosen))
    return s.zero(torch.where(x.chosen, torch.zeros_like(loss), loss)), metrics


@POLICY_LOSSES.register("kl_cov", needs=("old_logprobs",), config=KLCov, prepare=choose_kl_cov)
def kl_cov(x: PolicyInputs, c: KLCov) -> PolicyLoss:
    """-A rho, and + kl_coef |l - lo| at the tokens chosen (arXiv:2505.22617, KL-Cov).

    Chosen from the whole mini-batch: the max(1, int(cov_ratio n)) tokens of largest (A - mean A)(l - mean l); n: its
    counted tokens.
    """
    assert x.chosen is not None
    s = x.segments
    loss = -s.zero(x.advantages) * log_ratio(x).exp()
    pull = c.kl_coef * s.zero(x.logprobs - x.old_logprobs).abs()
    metrics = ratio_metrics(x).mean("actor/cov_fraction", *share(x, x.chosen))
    return s.zero(loss + torch.where(x.chosen, pull, torch.zeros_like(pull))), metrics
