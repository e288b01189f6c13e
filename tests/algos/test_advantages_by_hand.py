"""Advantages that one can check by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from verl.algos.advantages import ADVANTAGES, CreditInputs
from verl.algos.segments import Segments


def scored(scores: list[float], group: list[int], dtype: torch.dtype = torch.float64, **columns) -> CreditInputs:
    """One token a sample."""
    s = Segments.of(torch.arange(len(scores) + 1), torch.ones(len(scores), dtype=torch.bool))
    return CreditInputs(s, torch.tensor(scores, dtype=dtype), torch.tensor(group), **columns)


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def advantage(name: str, x: CreditInputs, **constants: float) -> torch.Tensor:
    entry = ADVANTAGES[name]
    return entry.fn(x, entry.config(**constants) if entry.config else None)[0]


def returns(name: str, x: CreditInputs, **constants: float) -> torch.Tensor:
    entry = ADVANTAGES[name]
    return entry.fn(x, entry.config(**constants) if entry.config else None)[1]


# One group of scores 3, 1, 0 with a lonely sample of 5 in the middle of its rows.
BY_HAND = {
    "grpo": [1.091088, 5.0, -0.218218, -0.872871],
    "rloo": [2.5, 0.0, -0.5, -2.0],
    "opo": [3 - 4 / 3, 5.0, 1 - 4 / 3, -4 / 3],
    "gpg": [4 / 3 * 5 / 3, 4 / 3 * 5, 4 / 3 * -1 / 3, 4 / 3 * -4 / 3],
    "grpo_passk": [2 / 1.527525, 0.0, 0.0, 0.0],
    "reinforce_pp_baseline": [(a - 1.25) / 2.793842 for a in (5 / 3, 5, -1 / 3, -4 / 3)],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    got = advantage(name, scored([3, 5, 1, 0], [8, 2, 8, 8]))
    np.testing.assert_allclose(got, BY_HAND[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*BY_HAND, "gdpo"])
def test_equal_scores_teach_nothing(name: str, dtype: torch.dtype) -> None:
    """Exactly nothing: 0.1 is no binary fraction, and its rounded mean, divided by std + 1e-6, would be far from 0."""
    x = scored([0.1, 0.7, 0.1, 0.7, 0.1, 0.7], [0, 1, 0, 1, 0, 1], dtype)
    x = replace(x, reward_parts=x.rewards[:, None].repeat(1, 2), reward_weights=torch.ones(6, 2, dtype=dtype))
    assert not advantage(name, x).any()


def test_a_small_spread_is_still_standardised() -> None:
    """Variance 1e-10: the std of 1e-5 counts ten times its floor of 1e-6."""
    std = 1e-5
    got = advantage("grpo", scored([0.5 - std, 0.5, 0.5 + std], [3, 3, 3]))
    np.testing.assert_allclose(got, [-std / (std + 1e-6), 0, std / (std + 1e-6)], rtol=1e-9, atol=1e-9)


def test_a_tie_for_the_best_leads_by_nothing() -> None:
    assert not advantage("grpo_passk", scored([1, 1, 0, 7, 7], [0, 0, 0, 1, 1])).any()


def test_gpg_counts_neither_excluded_samples_nor_the_reward_they_had() -> None:
    s = Segments.of(torch.arange(5), torch.tensor([1, 1, 1, 0], dtype=torch.bool))
    got = advantage("gpg", CreditInputs(s, row(1, 0, 0, 9), torch.zeros(4)))
    np.testing.assert_allclose(got, [2, -1, -1, 0])  # 3 counted, 1 of them with a reward: 3/1 (s - 1/3)
    assert not advantage("gpg", scored([0, 0], [0, 0])).any()


def test_opo_weighs_by_counted_tokens() -> None:
    s = Segments.of(torch.tensor([0, 4, 6]), torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool))
    got = advantage("opo", CreditInputs(s, row(0, 0, 50, 1, 0, 50), torch.zeros(2)))
    np.testing.assert_allclose(got, [0.25, 0.25, 0, 0.25, -0.75, 0])  # baseline (3 * 1 + 1 * 0) / 4


HOLED = Segments.of(torch.tensor([0, 6]), torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.bool))


def test_masked_tokens_cost_no_discount() -> None:
    x = CreditInputs(HOLED, row(0, 0, 9, 9, 0, 1), torch.zeros(1), values=torch.zeros(6, dtype=torch.float64))
    np.testing.assert_allclose(returns("gae", x, gamma=0.5, lam=1.0), [0.125, 0.25, 0, 0, 0.5, 1.0])
    np.testing.assert_allclose(returns("reinforce_pp", x, gamma=0.5), [0.125, 0.25, 0, 0, 0.5, 1.0])


def test_remax_subtracts_the_greedy_score() -> None:
    x = CreditInputs(HOLED, row(1, 0, 9, 9, 0, 2), torch.zeros(1), greedy_reward=row(0.5))
    np.testing.assert_allclose(returns("remax", x), [3, 2, 0, 0, 2, 2])
    np.testing.assert_allclose(advantage("remax", x), [2.5, 1.5, 0, 0, 1.5, 1.5])


def test_gdpo_keeps_apart_what_sums_to_the_same() -> None:
    """Scores 1 + 0 and 0 + 1 are a tie for grpo; a rarer component counts more here."""
    parts = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 0]], dtype=torch.float64)
    x = replace(scored([1, 1, 1, 0], [0] * 4), reward_parts=parts, reward_weights=torch.ones(4, 2).double())
    got = advantage("gdpo", x)
    assert got[0] > got[1] == got[2] > got[3]
    np.testing.assert_allclose([got.mean(), got.std()], [0, 1], atol=1e-7)


def token_baseline(lengths: list[int], mask: list[int], rewards: list[float], group: list[int]) -> torch.Tensor:
    """w = 1 at each token: pi = 1/2 and sum of squares 1, so W is the number of counted tokens so far."""
    s = Segments.of(torch.tensor([0, *np.cumsum(lengths)]), torch.tensor(mask, dtype=torch.bool))
    half = torch.full((len(mask),), 0.5, dtype=torch.float64)
    x = CreditInputs(s, row(*rewards), torch.tensor(group), old_logprobs=half.log(), sum_pi_squared=2 * half)
    return advantage("optimal_token_baseline", x)


def test_token_baseline_by_hand() -> None:
    # Position 1 is counted by both with W 1 and 1: b = (4 + 0)/2. Position 2 with 2 and 2. Position 3 by one only.
    got = token_baseline([4, 3], [0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 4, 0, 0, 0], [5, 5])
    np.testing.assert_allclose(got, [0, 2, 2, 4, 0, -2, -2], atol=1e-7)
    # Weights: the hole puts W 2 against 1 at position 3, where G is 3 and 0: b = 6/3.
    got = token_baseline([4, 4], [0, 1, 0, 1, 0, 0, 0, 1], [0, 0, 0, 3, 0, 0, 0, 0], [5, 5])
    np.testing.assert_allclose(got, [0, 3 - 3, 0, 1, 0, 0, 0, -2], atol=1e-7)


def test_token_baseline_of_a_lonely_sample_is_0() -> None:
    got = token_baseline([2, 2, 3], [0, 1, 0, 1, 0, 0, 0], [0, 3, 0, 1, 0, 0, 0], [5, 6, 6])
    np.testing.assert_allclose(got, [0, 3, 0, 1, 0, 0, 0])
