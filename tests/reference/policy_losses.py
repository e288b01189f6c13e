"""Plain numpy loops written from the formulas, float64. They know nothing of the code under test.

Each takes (new, old, adv, m, seq, constants by name) and returns (loss [T], slope, cut [T] bool or None): slope [T] is
d loss_t / d new_t, or [T, T] the derivative of loss_t by new_j where a token's loss hangs on others too; cut says where
the clip, as the paper defines it, cuts.
"""

import math

import numpy as np


def gap_of(new, old, t):
    """(log-ratio kept within 20, whether it moves with the new log-prob)."""
    gap = new[t] - old[t]
    return min(max(gap, -20.0), 20.0), -20.0 <= gap <= 20.0


def blank(new):
    return np.zeros(len(new)), np.zeros(len(new)), np.zeros(len(new), dtype=bool)


def counted(m):
    return [t for t in range(len(m)) if m[t]]


def surrogate(a, rho, low, high):
    """(value, whether the ratio moves it, whether the clip cuts it)."""
    free, cut = -a * rho, -a * min(max(rho, 1 - low), 1 + high)
    return max(free, cut), free >= cut, cut > free


def ppo_clip(new, old, adv, m, seq, *, clip_low, clip_high, dual_clip):
    loss, slope, cut = blank(new)
    for t in counted(m):
        gap, moves = gap_of(new, old, t)
        a, rho = adv[t], math.exp(gap)
        loss[t], free, cut[t] = surrogate(a, rho, clip_low, clip_high)
        slope[t] = -a * rho if moves and free else 0.0
        if dual_clip is not None and a < 0 and loss[t] > -a * dual_clip:
            loss[t], slope[t] = -a * dual_clip, 0.0
    return loss, slope, cut


def gspo(new, old, adv, m, seq, *, clip_low, clip_high):
    loss, slope, cut = blank(new)
    for i in set(seq):
        tokens = [t for t in counted(m) if seq[t] == i]
        if not tokens:
            continue
        mean = sum(new[t] - old[t] for t in tokens) / len(tokens)
        ratio = math.exp(min(mean, 10.0))
        for t in tokens:
            loss[t], free, cut[t] = surrogate(adv[t], ratio, clip_low, clip_high)
            slope[t] = -adv[t] * ratio if free and mean <= 10.0 else 0.0
    return loss, slope, cut


def cispo(new, old, adv, m, seq, *, clip_low, clip_high):
    loss, slope, cut = blank(new)
    for t in counted(m):
        rho = math.exp(gap_of(new, old, t)[0])
        weight = min(max(rho, 1 - clip_low), 1 + clip_high)
        loss[t], slope[t] = -weight * adv[t] * new[t], -weight * adv[t]
        cut[t] = adv[t] != 0 and not 1 - clip_low <= rho <= 1 + clip_high
    return loss, slope, cut


def sapo(new, old, adv, m, seq, *, tau_pos, tau_neg):
    loss, slope, _ = blank(new)
    for t in counted(m):
        gap, moves = gap_of(new, old, t)
        rho = math.exp(gap)
        tau = tau_pos if adv[t] > 0 else tau_neg
        tail = math.exp(-abs(tau * (rho - 1)))
        gate = 1 / (1 + tail) if rho >= 1 else tail / (1 + tail)
        loss[t] = -adv[t] * gate * 4 / tau
        slope[t] = -adv[t] * 4 * tail / (1 + tail) ** 2 * rho if moves else 0.0
    return loss, slope, None


def reinforce(new, old, adv, m, seq):
    loss, slope, _ = blank(new)
    for t in counted(m):
        loss[t], slope[t] = -adv[t] * new[t], -adv[t]
    return loss, slope, None


gpg = reinforce


def dro(new, old, adv, m, seq, *, beta):
    loss, slope, _ = blank(new)
    for t in counted(m):
        gap = new[t] - old[t]
        loss[t], slope[t] = -(adv[t] * new[t] - beta / 2 * gap**2), -(adv[t] - beta * gap)
    return loss, slope, None


def geo_mean(new, old, adv, m, seq, *, clip_low, clip_high):
    loss, _, cut = blank(new)
    slope = np.zeros((len(new), len(new)))
    for i in set(seq):
        tokens = [t for t in counted(m) if seq[t] == i]
        if not tokens:
            continue
        kept = {}
        for t in tokens:
            gap = new[t] - old[t]
            if adv[t] > 0:
                kept[t], cut[t] = min(gap, clip_high), gap > clip_high
            elif adv[t] < 0:
                kept[t], cut[t] = max(gap, -clip_low), gap < -clip_low
            else:
                kept[t] = 0.0
        mean = sum(kept.values()) / len(tokens)
        value = -sum(adv[t] for t in tokens) / len(tokens) * math.exp(min(max(mean, -20.0), 20.0))
        for t in tokens:
            loss[t] = value
            for j in tokens:
                moves = adv[j] != 0 and not cut[j] and -20.0 <= mean <= 20.0
                slope[t, j] = value / len(tokens) if moves else 0.0
    return loss, slope, cut


def covariances(new, adv, m):
    """{t: (A - mean A)(l - mean l)} of the counted tokens."""
    tokens = counted(m)
    n = max(1, len(tokens))
    mean_a, mean_l = sum(adv[t] for t in tokens) / n, sum(new[t] for t in tokens) / n
    return {t: (adv[t] - mean_a) * (new[t] - mean_l) for t in tokens}


def choose_clip_cov(new, old, adv, m, draws, *, clip_low, clip_high, cov_ratio, cov_low, cov_high):
    """Set of tokens. draws: one random number a counted token, in order; the smallest win."""
    cov = covariances(new, adv, m)
    able = []
    for place, t in enumerate(cov):
        untouched = not surrogate(adv[t], math.exp(gap_of(new, old, t)[0]), clip_low, clip_high)[2]
        if untouched and cov_low < cov[t] < cov_high:
            able.append((draws[place], t))
    return {t for _, t in sorted(able)[: max(1, int(cov_ratio * len(cov)))]}


def choose_kl_cov(new, adv, m, *, cov_ratio):
    cov = covariances(new, adv, m)
    return set(sorted(cov, key=lambda t: -cov[t])[: max(1, int(cov_ratio * len(cov)))])


def clip_cov(new, old, adv, m, seq, chosen, *, clip_low, clip_high, **_):
    loss, slope, cut = ppo_clip(new, old, adv, m, seq, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    for t in chosen:
        loss[t], slope[t], cut[t] = 0.0, 0.0, True
    return loss, slope, cut


def kl_cov(new, old, adv, m, seq, chosen, *, kl_coef, **_):
    loss, slope, _ = blank(new)
    for t in counted(m):
        gap, moves = gap_of(new, old, t)
        loss[t], slope[t] = -adv[t] * math.exp(gap), -adv[t] * math.exp(gap) if moves else 0.0
        if t in chosen:
            loss[t] += kl_coef * abs(new[t] - old[t])
            slope[t] += kl_coef * np.sign(new[t] - old[t])
    return loss, slope, None


def dppo(new, old, adv, m, dual_clip, valid):
    """valid: (advantage, p, po) -> bool."""
    loss, slope, cut = blank(new)
    for t in counted(m):
        a = adv[t]
        weight = math.exp(gap_of(new, old, t)[0])
        if dual_clip is not None:
            weight = min(weight, dual_clip)
        if valid(a, math.exp(new[t]), math.exp(old[t])):
            loss[t], slope[t] = -a * weight * new[t], -a * weight
        else:
            cut[t] = a != 0
    return loss, slope, cut


def dppo_tv(new, old, adv, m, seq, *, clip_low, clip_high, dual_clip):
    return dppo(new, old, adv, m, dual_clip, lambda a, p, po: p - po <= clip_high if a > 0 else p - po >= -clip_low)


def dppo_kl(new, old, adv, m, seq, *, eps, dual_clip):
    def valid(a, p, po):
        rest, rest_old = max(1 - p, 1e-12), max(1 - po, 1e-12)
        kl = po * (math.log(po) - math.log(p)) + (1 - po) * math.log(rest_old / rest)
        return kl <= eps or (a > 0 and p <= po) or (a < 0 and p >= po)

    return dppo(new, old, adv, m, dual_clip, valid)
