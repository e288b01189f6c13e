"""Aggregation as plain loops written from the formulas. They know nothing of the code under test."""


def aggregate(rows, mode, length=None, group=None):
    """rows: list of (losses, mask) a sequence, the whole mini-batch; group: prompt of each sequence."""
    tokens = sum(sum(map(bool, m)) for _, m in rows)
    seqs = sum(any(m) for _, m in rows)
    sums = [sum(x for x, keep in zip(r, m, strict=True) if keep) for r, m in rows]
    counts = [sum(map(bool, m)) for _, m in rows]
    if mode == "token_mean":
        return sum(sums) / max(tokens, 1)
    if mode == "token_sum":
        return sum(sums)
    if mode == "seq_mean_token_sum":
        return sum(sums) / max(seqs, 1)
    if mode == "seq_mean_token_sum_norm":
        return sum(sums) / max(seqs, 1) / length
    if mode == "prompt_mean":
        return prompt_mean(sums, counts, list(range(len(rows))) if group is None else group)
    assert mode == "seq_mean_token_mean"
    return sum(s / c for s, c in zip(sums, counts, strict=True) if c) / max(seqs, 1)


def prompt_mean(sums, counts, group):
    total, count = {}, {}
    for s, c, g in zip(sums, counts, group, strict=True):
        if c:
            total[g] = total.get(g, 0.0) + s
            count[g] = count.get(g, 0) + c
    return sum(total[g] / count[g] for g in total) / max(len(total), 1)


def value_loss(v, old, target, m, clip):
    """(loss, derivative with respect to the value), per token."""
    loss, grad = [0.0] * len(v), [0.0] * len(v)
    for t in range(len(v)):
        if m[t]:
            near = min(max(v[t], old[t] - clip), old[t] + clip)
            free, cut = (v[t] - target[t]) ** 2, (near - target[t]) ** 2
            loss[t] = 0.5 * max(free, cut)
            grad[t] = v[t] - target[t] if free >= cut else (near - target[t]) * (near == v[t])
    return loss, grad
