"""The micro-batch planner: every item once, within the limit, balanced, deterministic."""

from hypothesis import given
from hypothesis import strategies as st

from verl.data import plan_micro_batches

costs_and_limit = st.tuples(st.lists(st.integers(0, 120), max_size=60), st.integers(1, 100))


@given(costs_and_limit)
def test_every_item_exactly_once_and_within_the_limit(case):
    costs, limit = case
    plan = plan_micro_batches(costs, limit)
    assert sorted(i for group in plan for i in group) == list(range(len(costs)))
    for group in plan:
        assert group and group == sorted(group)
        assert sum(costs[i] for i in group) <= limit or len(group) == 1
    assert plan == plan_micro_batches(list(costs), limit)


@given(costs_and_limit)
def test_never_more_bins_than_first_fit_needs(case):
    """Any two bins of a first-fit plan exceed the limit together, so their number is below 2 * sum / limit + 1."""
    costs, limit = case
    small = [c for c in costs if c <= limit]
    bins = len(plan_micro_batches(small, limit))
    assert bins >= -(-sum(small) // limit)
    assert bins <= max(1, 2 * sum(small) / limit + 1)


def test_bins_are_balanced():
    """Filling up to the limit would give 100 + 100 + 40."""
    plan = plan_micro_batches([10] * 24, 100)
    assert [len(group) for group in plan] == [8, 8, 8]


def test_where_balance_does_not_fit_first_fit_does():
    """Longest-first into the emptiest of two bins overflows: 3 and 3, 2 and 2, then 2 on top of 5."""
    costs = [3, 3, 2, 2, 2]
    plan = plan_micro_batches(costs, 6)
    assert sorted(sum(costs[i] for i in group) for group in plan) == [6, 6]


def test_an_item_above_the_limit_is_alone():
    assert plan_micro_batches([5, 50, 5], 10) == [[0, 2], [1]]


def test_nothing():
    assert plan_micro_batches([], 10) == []
