"""Plain numpy loops written from the formulas, float64. They know nothing of the code under test."""

import math

import numpy as np


def whiten(x, m):
    kept = [v for v, keep in zip(x, m, strict=True) if keep]
    mean = sum(kept) / len(kept) if kept else 0.0
    out = [v - mean if keep else 0.0 for v, keep in zip(x, m, strict=True)]
    if len(kept) < 2:
        return np.array(out)
    var = sum((v - mean) ** 2 for v in kept) / (len(kept) - 1)
    return np.array([v / math.sqrt(var + 1e-8) for v in out])


def kl(name, new, ref):
    out = []
    for p, q in zip(new, ref, strict=True):
        d = p - q
        e = min(max(-d, -20.0), 20.0)
        k3 = min(max(math.exp(e) - e - 1, -10.0), 10.0)
        out.append({"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": k3}[name])
    return np.array(out)


def kl_slope(name, new, ref):
    """Derivative of `kl` with respect to the new log-prob; 0 where k3 is cut."""
    out = []
    for p, q in zip(new, ref, strict=True):
        d = p - q
        inside = -20.0 <= -d <= 20.0 and math.exp(-d) + d - 1 <= 10.0
        k3 = 1 - math.exp(-d) if inside else 0.0
        out.append({"k1": 1.0, "abs": float(np.sign(d)), "k2": d, "k3": k3}[name])
    return np.array(out)
