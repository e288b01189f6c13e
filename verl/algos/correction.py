"""Rollout correction: what is done where the sampler's law was not the trainer's. Pure; every result is detached.

Throughout x = old log-prob - rollout log-prob of a counted token, so exp(x) is the trainer's probability over the
sampler's. Sources: truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training"; IcePop: Ling team 2025 (arXiv:2510.18855); k1, k2, k3: Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl.algos.segments import Segments
from verl.config.algorithm import CorrectionConfig
from verl.config.base import Section
from verl.core.errors import ConfigError
from verl.core.metrics import Metrics

BOUND = 20.0
"""Log-ratios are cut here before their exponential, so that it is finite (4.9e8) in float32, squared as well."""


def check_correction(cfg: CorrectionConfig, at: str = "algorithm.rollout_correction") -> None:
    """ConfigError that names the field, for values that contradict each other or would do nothing."""
    if cfg.level == "off":
        refuse_idle(cfg, at, ("kind", "cap", "low", "high"), "level is off")
    elif cfg.kind == "icepop":
        refuse_idle(cfg, at, ("cap",), "kind is icepop")
        if not cfg.low <= 1 <= cfg.high:
            field = "low" if cfg.low > 1 else "high"
            raise ConfigError(
                f"{at}.{field}: a weight of 1 (sampler and trainer agree) must lie within [low, high], which is "
                f"[{cfg.low:g}, {cfg.high:g}]; set low to at most 1 and high to at least 1"
            )
    else:
        refuse_idle(cfg, at, ("low", "high"), "kind is tis")
    if cfg.normalize and cfg.level == "off":
        raise ConfigError(f"{at}.normalize: there are no weights while {at}.level is off; set level=token or sequence")
    if cfg.old_logprobs == "bypass" and (cfg.level != "off" or cfg.reject != "off"):
        field = "level" if cfg.level != "off" else "reject"
        raise ConfigError(
            f"{at}.{field}: does nothing with {at}.old_logprobs=bypass, where old and rollout log-probs are the same; "
            f"set old_logprobs=recompute, or {field}=off"
        )
    _check_rejection(cfg, at)


def _check_rejection(cfg: CorrectionConfig, at: str) -> None:
    if cfg.reject == "off":
        refuse_idle(cfg, at, ("statistic", "reject_low", "reject_high"), "reject is off")
        return
    if cfg.reject_high is None:
        raise ConfigError(f"{at}.reject_high: needed by {at}.reject={cfg.reject}; give the highest value that stays")
    if cfg.statistic != "k1":
        if cfg.reject_low is not None:
            raise ConfigError(f"{at}.reject_low: {cfg.statistic} has no lower bound; set statistic=k1, or null here")
    elif cfg.reject_high < 1.0 or (cfg.reject_low is not None and cfg.reject_low > 1.0):
        field = "reject_high" if cfg.reject_high < 1.0 else "reject_low"
        raise ConfigError(
            f"{at}.{field}: a ratio of 1 (sampler and trainer agree) must stay, so reject_low is at most 1 and "
            f"reject_high at least 1; got {getattr(cfg, field):g}"
        )


def refuse_idle(section: Section, at: str, fields: Sequence[str], why: str) -> None:
    """ConfigError for the first of these fields that was changed although, as `why` says, it does nothing."""
    for field in fields:
        default = type(section).model_fields[field].default
        if getattr(section, field) != default:
            shown = "null" if default is None else default
            raise ConfigError(f"{at}.{field}: does nothing while {at}.{why}; leave it at {shown}, or change that")


def importance_weights(segments: Segments, old: Tensor, rollout: Tensor, cfg: CorrectionConfig) -> Tensor:
    """[T] weight of each token's policy loss, detached, 0 where the mask is 0; ones at level off.

    old, rollout [T]: log-probs of the trainer before the update and of the sampler. Level token: exp(x) of the token;
    sequence: exp(sum of x) at each token of it. `normalize` divides by the mean over the tokens (level token) or the
    sequences (level sequence) that count here, so call it on the whole batch; rejected tokens leave the mean when
    `segments` has their mask off.
    """
    s, x = segments, _gap(segments, old, rollout)
    if cfg.level == "off":
        return s.zero(torch.ones_like(x))
    if cfg.level == "token":
        w_T = s.zero(_limit(x.clamp(-BOUND, BOUND).exp(), cfg))
        return w_T / _divisor(s.mean(w_T)) if cfg.normalize else w_T
    w_N = _limit(s.sum_per_seq(x).clamp(-BOUND, BOUND).exp(), cfg)
    if cfg.normalize:
        counted = s.counts > 0
        w_N = w_N / _divisor(torch.where(counted, w_N, torch.zeros_like(w_N)).sum() / counted.sum().clamp(min=1))
    return s.spread(w_N)


def kept(segments: Segments, old: Tensor, rollout: Tensor, cfg: CorrectionConfig) -> Tensor:
    """[T] bool: the counted tokens that stay. What is rejected must leave numerator and denominator.

    k1 bounds the ratio exp(x) of the token, or exp of its sum or mean over the sequence, within
    [reject_low or 1 / reject_high, reject_high]; sequence_max asks it of every token. k2 and k3: the statistic of the
    token, or its sum, mean or maximum over the sequence, is at most reject_high. Call `check_correction` first.
    """
    s = segments
    if cfg.reject == "off":
        return s.mask
    assert cfg.reject_high is not None
    x = _gap(s, old, rollout)
    inside = _inside_k1 if cfg.statistic == "k1" else _inside_divergence
    value = x if cfg.statistic == "k1" else _divergence(x, cfg.statistic)
    if cfg.reject == "token":
        return s.mask & inside(value, cfg)
    if cfg.reject == "sequence_max":  # the largest is within the bounds where all are
        stays = s.sum_per_seq((~inside(value, cfg)).to(x.dtype)) == 0
    else:
        stays = inside(s.sum_per_seq(value) if cfg.reject == "sequence_sum" else s.mean_per_seq(value), cfg)
    return s.mask & stays[s.seq]


def mismatch(segments: Segments, old: Tensor, rollout: Tensor) -> Metrics:
    """How far the trainer's log-probs [T] are from the sampler's: mean and max of |x|, mean k3, and the mean token
    weight and its square, from which `effective_sample_size` follows. All merge exactly over parts."""
    x = _gap(segments, old, rollout).double()
    n, w = float(segments.mask.sum()), segments.zero(x.clamp(-BOUND, BOUND).exp())
    out = Metrics().mean("rollout/logprob_gap", float(x.abs().sum()), n)
    out.max("rollout/logprob_gap_max", float(x.abs().max()) if len(x) else 0.0)
    out.mean("rollout/k3", float(segments.zero(_divergence(x, "k3")).sum()), n)
    out.mean("rollout/weight", float(w.sum()), n)
    return out.mean("rollout/weight_square", float((w * w).sum()), n)


def effective_sample_size(values: Mapping[str, float]) -> float | None:
    """1 / mean((w / mean w)^2) in (0, 1], from the values of `mismatch`; 1: no mismatch. None where nothing counted."""
    if "rollout/weight" not in values or "rollout/weight_square" not in values:
        return None
    return values["rollout/weight"] ** 2 / values["rollout/weight_square"]


def _gap(s: Segments, old: Tensor, rollout: Tensor) -> Tensor:
    return s.zero((old - rollout).detach())


def _limit(w: Tensor, cfg: CorrectionConfig) -> Tensor:
    if cfg.kind == "tis":
        return w.clamp(max=cfg.cap)
    return torch.where((w >= cfg.low) & (w <= cfg.high), w, torch.zeros_like(w))


def _divisor(mean: Tensor) -> Tensor:
    """The mean weight, or 1 where all weights are 0: they stay 0."""
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _divergence(x: Tensor, statistic: str) -> Tensor:
    return 0.5 * x * x if statistic == "k2" else x.clamp(-BOUND, BOUND).exp() - 1.0 - x


def _inside_k1(log_ratio: Tensor, cfg: CorrectionConfig) -> Tensor:
    assert cfg.reject_high is not None
    low = 1.0 / cfg.reject_high if cfg.reject_low is None else cfg.reject_low
    ratio = log_ratio.clamp(-BOUND, BOUND).exp()
    return (ratio >= low) & (ratio <= cfg.reject_high)


def _inside_divergence(value: Tensor, cfg: CorrectionConfig) -> Tensor:
    assert cfg.reject_high is not None
    return value <= cfg.reject_high
