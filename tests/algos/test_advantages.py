"""Every advantage estimator against its numpy twin, float64, over ragged groups of 1 to 4 in shuffled rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.ragged import Ragged
from tests.reference import advantages as twin
from verl.algos.advantages import ADVANTAGES, GAE, GRPO, CreditInputs, ReinforcePP

SEQ_COLUMNS = ("greedy_reward", "reward_parts", "reward_weights")
OPTIONAL = ("values", "old_logprobs", "sum_pi_squared", *SEQ_COLUMNS)
TOL = {"rtol": 1e-10, "atol": 1e-10}


@st.composite
def grouped(draw: st.DrawFn) -> Ragged:
    """Groups of 1 to 4 samples in shuffled rows, any mask, some rows without a counted token."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    group = np.repeat([17 - 6 * i for i in range(len(sizes))], sizes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group = rng.permutation(group)
    lengths = draw(st.lists(st.integers(1, 6), min_size=len(group), max_size=len(group)))
    mask = rng.random(sum(lengths)) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    gone = rng.random(len(group)) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    return Ragged(lengths, mask & ~np.repeat(gone, lengths), group, rng)


def inputs(x: Ragged, coarse: bool) -> CreditInputs:
    """Coarse rewards are multiples of 1/2: exact sums, with ties and zeros."""

    def rewards(*shape: int) -> torch.Tensor:
        value = torch.from_numpy(x.rng.normal(size=shape))
        return (2 * value).round() / 2 if coarse else value

    tokens, n = len(x.mask), len(x.lengths)
    pi = torch.from_numpy(x.rng.uniform(0.05, 0.9, tokens))
    return CreditInputs(
        x.segments,
        rewards(tokens),
        torch.from_numpy(x.group),
        values=x.column(),
        greedy_reward=rewards(n),
        reward_parts=rewards(n, 3),
        reward_weights=torch.tensor([[1.0, 0.25, -2.0]], dtype=torch.float64).expand(n, 3),
        old_logprobs=pi.log(),
        sum_pi_squared=pi**2 + torch.from_numpy(x.rng.random(tokens)) * (1 - pi) ** 2,
    )


def check(x: Ragged, got: tuple, want: tuple) -> None:
    for ours, theirs in zip(got, want, strict=True):
        if theirs is None:
            assert ours is None
            continue
        assert ours.dtype == torch.float64
        np.testing.assert_allclose(ours, theirs, **TOL)
        assert not ours[~torch.from_numpy(x.mask)].any()


@settings(max_examples=60, deadline=None)
@given(grouped(), st.booleans(), st.floats(0, 1), st.floats(0, 1))
def test_gae(x: Ragged, coarse: bool, gamma: float, lam: float) -> None:
    c = inputs(x, coarse)
    got = ADVANTAGES["gae"].fn(c, GAE(gamma=gamma, lam=lam))
    check(x, got, twin.gae(x.rows(c.rewards, c.values), gamma, lam))


@settings(max_examples=60, deadline=None)
@given(grouped(), st.booleans(), st.booleans())
def test_grpo(x: Ragged, coarse: bool, normalize: bool) -> None:
    c = inputs(x, coarse)
    got = ADVANTAGES["grpo"].fn(c, GRPO(normalize_by_std=normalize))
    check(x, got, twin.grpo(x.rows(c.rewards), x.group, normalize))


@pytest.mark.parametrize("name", ["rloo", "opo", "reinforce_pp_baseline", "gpg", "grpo_passk"])
@settings(max_examples=60, deadline=None)
@given(x=grouped(), coarse=st.booleans())
def test_comparing_scores(name: str, x: Ragged, coarse: bool) -> None:
    c = inputs(x, coarse)
    check(x, ADVANTAGES[name].fn(c, None), getattr(twin, name)(x.rows(c.rewards), x.group))


@settings(max_examples=60, deadline=None)
@given(grouped(), st.booleans(), st.floats(0, 1))
def test_reinforce_pp(x: Ragged, coarse: bool, gamma: float) -> None:
    c = inputs(x, coarse)
    got = ADVANTAGES["reinforce_pp"].fn(c, ReinforcePP(gamma=gamma))
    check(x, got, twin.reinforce_pp(x.rows(c.rewards), gamma))


@settings(max_examples=60, deadline=None)
@given(grouped(), st.booleans())
def test_remax(x: Ragged, coarse: bool) -> None:
    c = inputs(x, coarse)
    check(x, ADVANTAGES["remax"].fn(c, None), twin.remax(x.rows(c.rewards), c.greedy_reward.tolist()))


@settings(max_examples=60, deadline=None)
@given(grouped(), st.booleans())
def test_gdpo(x: Ragged, coarse: bool) -> None:
    c = replace(inputs(x, coarse), rewards=torch.full((len(x.mask),), torch.nan, dtype=torch.float64))
    want = twin.gdpo(x.rows(), x.group, c.reward_parts.numpy(), c.reward_weights.numpy())
    check(x, ADVANTAGES["gdpo"].fn(c, None), want)


@settings(max_examples=100, deadline=None)
@given(grouped(), st.booleans())
def test_optimal_token_baseline(x: Ragged, coarse: bool) -> None:
    c = inputs(x, coarse)
    rows = x.rows(c.rewards, c.old_logprobs, c.sum_pi_squared)
    check(x, ADVANTAGES["optimal_token_baseline"].fn(c, None), twin.optimal_token_baseline(rows, x.group))


@pytest.mark.parametrize("name", ADVANTAGES.names())
@settings(max_examples=30, deadline=None)
@given(x=grouped(), poison=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]))
def test_what_is_not_counted_changes_nothing(name: str, x: Ragged, poison: float) -> None:
    clean, entry = inputs(x, False), ADVANTAGES[name]
    row_counts = x.segments.counts > 0
    dirty = {}
    for column in ("rewards", *OPTIONAL):
        value = getattr(clean, column)
        if column not in SEQ_COLUMNS:
            dirty[column] = x.poisoned(value, poison)
        else:
            good = row_counts.reshape(-1, *[1] * (value.ndim - 1))
            dirty[column] = torch.where(good, value, torch.tensor(poison, dtype=value.dtype))
    config = entry.config() if entry.config else None
    for a, b in zip(entry.fn(clean, config), entry.fn(replace(clean, **dirty), config), strict=True):
        assert a is b is None or (torch.equal(a, b) and torch.isfinite(b).all())


def test_every_estimator_has_a_twin() -> None:
    assert {e.name for e in ADVANTAGES} == {n for n in dir(twin) if n in ADVANTAGES}


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_needs_name_what_is_read(name: str) -> None:
    """An entry runs with the columns that it needs and no other."""
    x = Ragged(
        [2, 3, 2, 1], np.array([1, 1, 0, 1, 1, 0, 1, 1], dtype=bool), np.array([4, 9, 4, 9]), np.random.default_rng(0)
    )
    full, entry = inputs(x, False), ADVANTAGES[name]
    bare = replace(full, **{k: None for k in OPTIONAL if k not in entry.needs})
    config = entry.config() if entry.config else None
    for a, b in zip(entry.fn(bare, config), entry.fn(full, config), strict=True):
        assert a is b is None or torch.equal(a, b)
    if "group_id" not in entry.needs:
        other = entry.fn(replace(full, group=torch.zeros(4)), config)
        assert torch.equal(other[0], entry.fn(full, config)[0])
