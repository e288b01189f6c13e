"""Which sequences share a micro-batch: a pure planner."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_micro_batches(costs: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split items of the given costs (tokens) into few, balanced bins of at most `max_tokens` each.

    Every index appears exactly once. An item above the limit gets a bin of its own. The same input gives the same plan.
    The smallest number of bins is tried first, the longest item going to the emptiest bin; where that overflows, one
    bin more, up to what first-fit on the same order needs.
    """
    assert max_tokens >= 1 and all(cost >= 0 for cost in costs)
    alone = [[i] for i, cost in enumerate(costs) if cost > max_tokens]
    order = sorted((i for i, cost in enumerate(costs) if cost <= max_tokens), key=lambda i: (-costs[i], i))
    bins = alone + _balanced(order, costs, max_tokens)
    return sorted(sorted(group) for group in bins)


def _balanced(order: list[int], costs: Sequence[int], limit: int) -> list[list[int]]:
    if not order:
        return []
    fallback = _first_fit(order, costs, limit)
    fewest = max(1, -(-sum(costs[i] for i in order) // limit))
    for count in range(fewest, len(fallback) + 1):
        plan = _emptiest(order, costs, limit, count)
        if plan is not None:
            return plan
    return fallback


def _emptiest(order: list[int], costs: Sequence[int], limit: int, count: int) -> list[list[int]] | None:
    """Each item into the emptiest of `count` bins; None where one does not fit there, so nowhere."""
    heap = [(0, b) for b in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        load, b = heap[0]
        if load + costs[i] > limit:
            return None
        heapq.heapreplace(heap, (load + costs[i], b))
        bins[b].append(i)
    return [group for group in bins if group]


def _first_fit(order: list[int], costs: Sequence[int], limit: int) -> list[list[int]]:
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in order:
        for b, load in enumerate(loads):
            if load + costs[i] <= limit:
                bins[b].append(i)
                loads[b] += costs[i]
                break
        else:
            bins.append([i])
            loads.append(costs[i])
    return bins
