"""Advantages as plain loops written from the formulas, float64. They know nothing of the code under test.

rows: list of (columns..., mask) a sequence. Each returns (advantages, returns or None), flat over the batch.
"""

import math

import numpy as np

from tests.reference.algos import whiten


def score_of(reward, mask):
    return sum(r for r, keep in zip(reward, mask, strict=True) if keep)


def mates_of(rows, group, i):
    """Indices of the counted samples of the prompt of sample i."""
    return [j for j in range(len(rows)) if group[j] == group[i] and any(rows[j][-1])]


def mean_std(values):
    """Mean and unbiased standard deviation; 0 and 1 for fewer than two."""
    if len(values) < 2:
        return 0.0, 1.0
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def broadcast(rows, per_sample):
    return np.array([a if keep else 0.0 for row, a in zip(rows, per_sample, strict=True) for keep in row[-1]])


def flat_mask(rows):
    return [keep for row in rows for keep in row[-1]]


def to_go(reward, mask, gamma):
    out, carried = [0.0] * len(reward), 0.0
    for t in reversed(range(len(reward))):
        if mask[t]:
            carried = reward[t] + gamma * carried
            out[t] = carried
    return out


def gae(rows, gamma, lam):
    """rows: (rewards, values, mask)."""
    adv, ret = [], []
    for r, v, m in rows:
        a_row, follow, carried = [0.0] * len(r), 0.0, 0.0
        for t in range(len(r) - 1, -1, -1):
            if not m[t]:
                continue
            delta = r[t] + gamma * follow - v[t]
            carried = delta + gamma * lam * carried
            follow = v[t]
            a_row[t] = carried
        adv += a_row
        ret += [a + x if keep else 0.0 for a, x, keep in zip(a_row, v, m, strict=True)]
    return whiten(adv, flat_mask(rows)), np.array(ret)


def grpo(rows, group, normalize):
    """rows: (rewards, mask), as in all that follow but where said."""
    score = [score_of(*row) for row in rows]
    out = []
    for i in range(len(rows)):
        mean, std = mean_std([score[j] for j in mates_of(rows, group, i)])
        out.append((score[i] - mean) / (std + 1e-6) if normalize else score[i] - mean)
    return broadcast(rows, out), None


def rloo(rows, group):
    """The baseline is the mean of the other samples, as the method's name says."""
    score = [score_of(*row) for row in rows]
    out = []
    for i in range(len(rows)):
        others = [score[j] for j in mates_of(rows, group, i) if j != i]
        out.append(score[i] - sum(others) / len(others) if others else 0.0)
    return broadcast(rows, out), None


def opo(rows, group):
    score, length = [score_of(*row) for row in rows], [sum(map(bool, row[-1])) for row in rows]
    out = []
    for i in range(len(rows)):
        mates = mates_of(rows, group, i)
        base = sum(length[j] * score[j] for j in mates) / sum(length[j] for j in mates) if len(mates) > 1 else 0.0
        out.append(score[i] - base)
    return broadcast(rows, out), None


def reinforce_pp(rows, gamma):
    returns = [g for row in rows for g in to_go(*row, gamma)]
    return whiten(returns, flat_mask(rows)), np.array(returns)


def reinforce_pp_baseline(rows, group):
    return whiten(grpo(rows, group, False)[0], flat_mask(rows)), None


def remax(rows, greedy):
    returns = [to_go(*row, 1.0) for row in rows]
    adv = [
        g - b if keep else 0.0
        for row, go, b in zip(rows, returns, greedy, strict=True)
        for g, keep in zip(go, row[-1], strict=True)
    ]
    return np.array(adv), np.array([g for go in returns for g in go])


def gpg(rows, group):
    counted = [score_of(*row) for row in rows if any(row[-1])]
    factor = len(counted) / max(1, sum(s != 0 for s in counted))
    return factor * grpo(rows, group, False)[0], None


def grpo_passk(rows, group):
    """The first of the best samples gets the lead over the next in rank."""
    score = [score_of(*row) for row in rows]
    out = [0.0] * len(rows)
    for i in range(len(rows)):
        ranked = sorted(mates_of(rows, group, i), key=lambda j: -score[j])
        if len(ranked) > 1 and ranked[0] == i:
            std = mean_std([score[j] for j in ranked])[1]
            out[i] = (score[i] - score[ranked[1]]) / (std + 1e-6)
    return broadcast(rows, out), None


def gdpo(rows, group, parts, weights):
    """parts, weights: [N, K]. rows: (mask,)."""
    out = [0.0] * len(rows)
    for i in range(len(rows)):
        for k in range(parts.shape[1]):
            mean, std = mean_std([parts[j, k] for j in mates_of(rows, group, i)])
            out[i] += weights[i, k] * (parts[i, k] - mean) / (std + 1e-6)
    return whiten(broadcast(rows, out), flat_mask(rows)), None


def optimal_token_baseline(rows, group):
    """rows: (rewards, old log-probs, sums of squared probabilities, mask)."""
    go = [to_go(r, m, 1.0) for r, _, _, m in rows]
    energy = []
    for _, logp, square, m in rows:
        total, row = 0.0, []
        for t in range(len(m)):
            total += 1 - 2 * math.exp(logp[t]) + square[t] if m[t] else 0.0
            row.append(total)
        energy.append(row)
    ends = [max((t + 1 for t in range(len(row[-1])) if row[-1][t]), default=0) for row in rows]
    adv = []
    for i in range(len(rows)):
        mates = mates_of(rows, group, i)
        reach = sorted(ends[j] for j in mates)[-2] if len(mates) > 1 else 0
        for t in range(len(rows[i][-1])):
            here = [j for j in mates if t < len(rows[j][-1]) and rows[j][-1][t]]
            base = 0.0
            if t < reach:
                base = sum(go[j][t] * energy[j][t] for j in here) / (sum(energy[j][t] for j in here) + 1e-8)
            adv.append(go[i][t] - base if rows[i][-1][t] else 0.0)
    return np.array(adv), np.array([g for row in go for g in row])
