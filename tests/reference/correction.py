"""Rollout correction and pass@k as plain loops written from the formulas; rows are (old, rollout, mask) a sequence."""

import itertools
import math


def cut(x):
    return min(max(x, -20.0), 20.0)


def gaps(old, rollout, mask):
    return [a - b for a, b, keep in zip(old, rollout, mask, strict=True) if keep]


def limited(w, cfg):
    if cfg.kind == "tis":
        return min(w, cfg.cap)
    return w if cfg.low <= w <= cfg.high else 0.0


def weights(rows, cfg):
    """[T], flat."""
    out, pool = [], []
    for old, rollout, mask in rows:
        whole = limited(math.exp(cut(sum(gaps(old, rollout, mask)))), cfg)
        row = []
        for a, b, keep in zip(old, rollout, mask, strict=True):
            w = {"off": 1.0, "token": limited(math.exp(cut(a - b)) if keep else 1.0, cfg), "sequence": whole}[cfg.level]
            row.append(w if keep else 0.0)
        out += row
        if cfg.level == "sequence":
            pool += [whole] if any(mask) else []
        else:
            pool += [w for w, keep in zip(row, mask, strict=True) if keep]
    mean = sum(pool) / len(pool) if pool else 0.0
    if cfg.level != "off" and cfg.normalize and mean > 0:
        return [w / mean for w in out]
    return out


def statistic(x, cfg):
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(cut(x)) - 1 - x}[cfg.statistic]


def inside(value, cfg):
    if cfg.statistic != "k1":
        return value <= cfg.reject_high
    low = cfg.reject_low if cfg.reject_low is not None else 1 / cfg.reject_high
    return low <= math.exp(cut(value)) <= cfg.reject_high


def kept(rows, cfg):
    """[T] bool, flat."""
    out = []
    for old, rollout, mask in rows:
        values = [statistic(x, cfg) for x in gaps(old, rollout, mask)]
        if not values:
            out += [False] * len(mask)
        elif cfg.reject == "off":
            out += [bool(keep) for keep in mask]
        elif cfg.reject == "token":
            out += [
                bool(keep) and inside(statistic(a - b, cfg) if keep else 0.0, cfg)
                for a, b, keep in zip(old, rollout, mask, strict=True)
            ]
        else:
            stays = {
                "sequence_sum": lambda v: inside(sum(v), cfg),
                "sequence_mean": lambda v: inside(sum(v) / len(v), cfg),
                "sequence_max": lambda v: all(inside(x, cfg) for x in v),
            }[cfg.reject](values)
            out += [bool(keep) and stays for keep in mask]
    return out


def pass_at_k(n, c, k):
    """Count the k-subsets of n samples that hold one of the c correct ones."""
    subsets = list(itertools.combinations(range(n), k))
    return sum(any(i < c for i in s) for s in subsets) / len(subsets)
