"""verl.algos.functional: the flat functions on padded tensors, whatever the padding; errors that say what was given."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algos.ragged import Ragged, ragged
from verl.algos import functional as F
from verl.algos.advantages import ADVANTAGES, CreditInputs
from verl.algos.aggregate import MODES, Aggregation, Denominators, tokens_per_prompt
from verl.algos.correction import importance_weights, kept
from verl.algos.kl import KL_ESTIMATORS, kl_values
from verl.algos.policy_losses import POLICY_LOSSES, PolicyInputs
from verl.algos.segments import Segments
from verl.algos.value_loss import value_loss
from verl.config.algorithm import CorrectionConfig
from verl.core.errors import ConfigError

TOL = {"rtol": 1e-10, "atol": 1e-10}
NAN = float("nan")


class Pads:
    """Ragged rows put into [B, T]: `extra` empty slots anywhere between their tokens, some more left and right."""

    def __init__(self, x: Ragged, extra: int, left: int = 0, right: int = 0):
        rng = np.random.default_rng(extra)
        inner = max(x.lengths) + extra
        self.rows, self.width = len(x.lengths), left + inner + right
        chosen = [np.sort(rng.choice(inner, n, replace=False)) if extra else np.arange(n) for n in x.lengths]
        self.place = torch.from_numpy(np.concatenate([left + c + i * self.width for i, c in enumerate(chosen)]))

    def __call__(self, column: Tensor, fill: float = NAN) -> Tensor:
        out = torch.full((self.rows * self.width,), fill, dtype=column.dtype)
        return out.index_copy(0, self.place, column).view(self.rows, self.width)

    def flat(self, padded: Tensor) -> Tensor:
        return padded.flatten()[self.place]


def grads(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


@settings(max_examples=40, deadline=None)
@given(ragged(), st.integers(0, 5), st.sampled_from(MODES), st.booleans())
def test_policy_losses(x: Ragged, extra: int, mode: str, weighted: bool) -> None:
    pad, s, group = Pads(x, extra), x.segments, torch.from_numpy(x.group)
    new, old, adv, weight = x.column().requires_grad_(), x.column(), x.column(), x.column().abs()
    mask = pad(torch.from_numpy(x.mask).double(), 0.0)
    for entry in POLICY_LOSSES:
        c = entry.config() if entry.config else None
        chosen = None if entry.prepare is None else entry.prepare(PolicyInputs(s, new.detach(), old, adv), c, 7)
        token_loss, metrics = entry.fn(PolicyInputs(s, new, old, adv, chosen), c)
        token_loss = token_loss * weight if weighted else token_loss
        want = Aggregation(mode, 9)(token_loss, s, Denominators.of(s, group), tokens_per_prompt(s, group))
        got, values = F.policy_loss(
            entry.name,
            logprobs=pad(new),
            old_logprobs=pad(old),
            advantages=pad(adv),
            mask=mask,
            aggregation=mode,
            rollout_weights=pad(weight) if weighted else None,
            length=9,
            group_ids=group,
            seed=7,
        )
        assert got.dtype == torch.float64 and got.ndim == 0
        np.testing.assert_allclose(got.detach(), want.detach(), **TOL, err_msg=entry.name)
        np.testing.assert_allclose(grads(got, new), grads(want, new), **TOL, err_msg=entry.name)
        assert values == pytest.approx(metrics.values_by_name(), nan_ok=False), entry.name


@settings(max_examples=40, deadline=None)
@given(ragged(), st.integers(0, 5))
def test_advantages(x: Ragged, extra: int) -> None:
    pad, s, n = Pads(x, extra), x.segments, len(x.lengths)
    reward, values, old, squares = x.column(), x.column(), -x.column().abs(), x.column().abs().clamp(max=1)
    greedy, parts, weights = (torch.from_numpy(x.rng.normal(size=shape)) for shape in (n, (n, 3), 3))
    flat = {
        "values": values,
        "greedy_reward": greedy,
        "reward_parts": parts,
        "reward_weights": weights.expand(n, 3),
        "old_logprobs": old,
        "sum_pi_squared": squares,
    }
    for entry in ADVANTAGES:
        want, want_returns = entry.fn(
            CreditInputs(s, reward, torch.from_numpy(x.group), **flat), entry.config() if entry.config else None
        )
        got, returns = F.compute_advantages(
            entry.name,
            rewards=pad(reward),
            mask=pad(torch.from_numpy(x.mask).long(), 0),
            group_ids=[f"prompt {g}" for g in x.group],
            values=pad(values),
            greedy_rewards=greedy,
            reward_parts=parts,
            reward_weights=weights,
            logprobs=pad(old),
            sum_pi_squared=pad(squares),
        )
        assert got.dtype == returns.dtype == torch.float64
        if entry.name != "optimal_token_baseline":  # it compares tokens by their column: see the next test
            np.testing.assert_allclose(pad.flat(got), want, **TOL, err_msg=entry.name)
        assert not got[pad(torch.from_numpy(x.mask).long(), 0) == 0].any(), entry.name
        if want_returns is None:
            want_returns = reward_to_go(x, reward)
        np.testing.assert_allclose(pad.flat(returns), want_returns, **TOL, err_msg=entry.name)


@settings(max_examples=30, deadline=None)
@given(ragged(), st.integers(0, 3), st.integers(0, 3))
def test_optimal_token_baseline_sees_no_padding_around_the_rows(x: Ragged, left: int, right: int) -> None:
    reward, old, squares = x.column(), -x.column().abs(), x.column().abs().clamp(max=1)
    inputs = CreditInputs(x.segments, reward, torch.from_numpy(x.group), old_logprobs=old, sum_pi_squared=squares)
    want, _ = ADVANTAGES["optimal_token_baseline"].fn(inputs, None)
    pad = Pads(x, 0, left, right)
    got, _ = F.compute_advantages(
        "optimal_token_baseline",
        rewards=pad(reward),
        mask=pad(torch.from_numpy(x.mask), False),
        group_ids=x.group,
        logprobs=pad(old),
        sum_pi_squared=pad(squares),
    )
    np.testing.assert_allclose(pad.flat(got), want, **TOL)


def reward_to_go(x: Ragged, reward: Tensor) -> list[float]:
    out = []
    for row, mask in x.rows(reward):
        out += [
            sum(r for r, m in zip(row[t:], mask[t:], strict=True) if m) if mask[t] else 0.0 for t in range(len(row))
        ]
    return out


@settings(max_examples=30, deadline=None)
@given(ragged(), st.integers(0, 4))
def test_a_score_goes_to_the_last_counted_token(x: Ragged, extra: int) -> None:
    pad, score = Pads(x, extra), torch.from_numpy(np.random.default_rng(0).normal(size=len(x.lengths)))
    mask = pad(torch.from_numpy(x.mask), False)
    tokens = torch.zeros_like(mask, dtype=torch.float64)
    for i in range(pad.rows):
        counted = mask[i].nonzero().flatten()
        if len(counted):
            tokens[i, counted[-1]] = score[i]
    values = pad(x.column())
    for name in ("gae", "reinforce_pp"):
        a, b = (F.compute_advantages(name, rewards=r, mask=mask, values=values) for r in (score, tokens))
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@settings(max_examples=30, deadline=None)
@given(ragged(), st.integers(0, 4), st.sampled_from(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]))
def test_value_loss(x: Ragged, extra: int, mode: str) -> None:
    pad, s = Pads(x, extra), x.segments
    v, old, target = x.column().requires_grad_(), x.column(), x.column()
    token_loss, metrics = value_loss(s, v, old, target, 0.3)
    want = Aggregation(mode, 5)(token_loss, s, Denominators.of(s))
    got, values = F.value_loss(
        values=pad(v),
        old_values=pad(old),
        returns=pad(target),
        mask=pad(torch.from_numpy(x.mask), False),
        clip=0.3,
        aggregation=mode,
        length=5,
    )
    np.testing.assert_allclose(got.detach(), want.detach(), **TOL)
    np.testing.assert_allclose(grads(got, v), grads(want, v), **TOL)
    assert values == pytest.approx(metrics.values_by_name())


@settings(max_examples=40, deadline=None)
@given(
    ragged(),
    st.integers(0, 4),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["off", "token", "sequence_sum"]),
)
def test_rollout_weights(x: Ragged, extra: int, level: str, reject: str) -> None:
    pad, s, old, rollout = Pads(x, extra), x.segments, x.column(), x.column()
    options: dict[str, Any] = {"level": level, "reject": reject, "normalize": True}
    options |= {} if reject == "off" else {"reject_high": 2.0}
    cfg = CorrectionConfig(**options)
    keep = kept(s, old, rollout, cfg)
    want = importance_weights(Segments(s.seq, keep, s.num_seqs), old, rollout, cfg)
    weights, mask, metrics = F.rollout_weights(pad(old), pad(rollout), pad(torch.from_numpy(x.mask), False), **options)
    assert mask.dtype == torch.bool and pad.flat(mask).tolist() == keep.tolist()
    assert int(mask.sum()) == int(keep.sum())
    np.testing.assert_allclose(pad.flat(weights), want, **TOL)
    if x.mask.any():
        assert metrics["rollout/rejected"] == pytest.approx(1 - float(keep.sum()) / x.mask.sum())
        assert 0 < metrics["rollout/ess"] <= 1 + 1e-12
        assert set(metrics) == {f"rollout/{k}" for k in ("logprob_gap", "logprob_gap_max", "k3", "ess", "rejected")}


def test_rollout_weights_are_of_tokens_unless_asked() -> None:
    old = torch.tensor([[0.0, 0.1, 0.2]])
    weights, mask, _ = F.rollout_weights(old, torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))
    np.testing.assert_allclose(weights, [[1.0, np.exp(0.1), 0.0]], rtol=1e-6)
    assert mask.tolist() == [[True, True, False]]


@pytest.mark.parametrize("name", [*KL_ESTIMATORS.names(), "k1+", "k3+"])
def test_kl(name: str) -> None:
    p, q = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, requires_grad=True).double()
    got = F.kl(name, p, q)
    assert torch.equal(got, kl_values(name, p, q)) and got.shape == (2, 3)
    q_leaf = q.detach().requires_grad_()
    assert torch.autograd.grad(F.kl(name, p, q_leaf).sum(), q_leaf, allow_unused=True)[0] is None


def test_gradients_flow_to_logprobs_only() -> None:
    p, old, adv, w = (torch.randn(2, 3, requires_grad=True) for _ in range(4))
    loss, _ = F.policy_loss(
        "ppo_clip", logprobs=p, old_logprobs=old, advantages=adv, mask=torch.ones(2, 3), rollout_weights=w
    )
    loss.backward()
    assert p.grad is not None and old.grad is adv.grad is w.grad is None


def test_no_old_logprobs_is_a_ratio_of_one() -> None:
    p = torch.randn(2, 3, requires_grad=True)
    loss, metrics = F.policy_loss(
        "ppo_clip", logprobs=p, old_logprobs=None, advantages=torch.tensor([1.0, -2.0]), mask=torch.ones(2, 3)
    )
    assert loss.item() == pytest.approx(0.5) and metrics["actor/approx_kl"] == 0
    np.testing.assert_allclose(grads(loss, p), [[-1 / 6] * 3, [2 / 6] * 3], rtol=1e-6)


def test_weights_of_rows_spread_over_their_tokens() -> None:
    p, row = torch.zeros(2, 3), torch.tensor([2.0, 4.0])
    one = F.policy_loss(
        "ppo_clip", logprobs=p, old_logprobs=None, advantages=row, mask=torch.ones(2, 3), rollout_weights=row
    )
    many = F.policy_loss(
        "ppo_clip",
        logprobs=p,
        old_logprobs=None,
        advantages=row[:, None].expand(2, 3),
        mask=torch.ones(2, 3),
        rollout_weights=row[:, None].expand(2, 3),
    )
    assert torch.equal(one[0], many[0]) and one[0].item() == pytest.approx(-10.0)


def test_constants_reach_the_loss() -> None:
    given = {**OK, "logprobs": torch.ones(2, 3), "advantages": torch.ones(2)}
    for high in (0.2, 0.5):
        assert F.policy_loss("ppo_clip", clip_high=high, **given)[0].item() == pytest.approx(-1 - high)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types_are_computed_in_float32(narrow: torch.dtype) -> None:
    loss, _ = F.policy_loss(
        "ppo_clip",
        logprobs=torch.zeros(1, 2, dtype=narrow),
        old_logprobs=None,
        advantages=torch.ones(1, dtype=torch.long),
        mask=torch.ones(1, 2),
    )
    assert loss.dtype == torch.float32


def test_nothing_counted_is_zero_not_nan() -> None:
    none, nan = torch.zeros(2, 3), torch.full((2, 3), NAN)
    for mode in MODES:
        assert F.aggregate(nan, none, mode, length=2, group_ids=[0, 1]) == 0
    advantages, returns = F.compute_advantages("grpo", rewards=nan, mask=none, group_ids=[0, 0])
    assert not advantages.any() and not returns.any()
    F.rollout_weights(nan, nan, none)


def test_prompt_mean_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [9.0, 5.0], [6.0, 7.0]]), torch.tensor([[1, 1], [1, 0], [1, 0]])
    assert F.aggregate(values, mask, "prompt_mean", group_ids=["b", "a", "b"]).item() == pytest.approx(6.0)


OK: dict[str, Any] = {
    "logprobs": torch.zeros(2, 3),
    "old_logprobs": torch.zeros(2, 3),
    "advantages": torch.zeros(2),
    "mask": torch.ones(2, 3),
}


def refusals() -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """(function, name, what is changed, words of the error)."""
    yield "policy_loss", "ppo_clop", {}, r"unknown .*'ppo_clop' \(did you mean 'ppo_clip'\?\); known: "
    yield "policy_loss", "ppo_clip", {"clip_lo": 0.1}, r"ppo_clip\.clip_lo: unknown key \(did you mean 'clip_low'"
    yield "policy_loss", "ppo_clip", {"clip_low": -0.1}, r"ppo_clip\.clip_low: .*greater than 0, got -0\.1"
    yield "policy_loss", "ppo_clip", {"mask": torch.full((2, 3), 0.5)}, "mask must hold 0 and 1 only"
    yield "policy_loss", "ppo_clip", {"mask": torch.ones(2)}, r"mask must be \[B, T\], got shape \[2\]"
    yield "policy_loss", "ppo_clip", {"mask": [[1, 1, 1]] * 2}, "mask must be a torch tensor, got list"
    yield "policy_loss", "ppo_clip", {"logprobs": torch.zeros(2, 4)}, r"logprobs .* \[2, 3\], got \[2, 4\]"
    yield "policy_loss", "ppo_clip", {"old_logprobs": torch.zeros(2)}, r"old_logprobs .* \[2, 3\], got \[2\]"
    yield "policy_loss", "ppo_clip", {"advantages": torch.zeros(3)}, r"advantages must be \[2, 3\].* or \[2\], got"
    yield "policy_loss", "ppo_clip", {"aggregation": "mean"}, "unknown mode 'mean'"
    yield "policy_loss", "ppo_clip", {"aggregation": "seq_mean_token_sum_norm"}, "length=..."
    yield (
        "policy_loss",
        "ppo_clip",
        {"aggregation": "seq_mean_token_sum_norm", "length": 0},
        "length must be at least 1",
    )
    yield "policy_loss", "ppo_clip", {"aggregation": "prompt_mean"}, "prompt_mean .* give group_ids"
    yield "policy_loss", "ppo_clip", {"rollout_weights": torch.ones(3, 3)}, r"rollout_weights .*got \[3, 3\]"
    rewards = {"rewards": torch.zeros(2)}
    yield "compute_advantages", "grpoo", rewards, r"unknown .*did you mean 'grpo'"
    yield "compute_advantages", "grpo", rewards, "'grpo' compares the samples of a prompt and needs group_ids"
    yield "compute_advantages", "gae", rewards, r"'gae' needs values; give values=\.\.\."
    yield "compute_advantages", "gae", {**rewards, "values": torch.zeros(2, 3), "lamb": 1}, "did you mean 'lam'"
    yield "compute_advantages", "grpo", {"rewards": torch.zeros(3), "group_ids": [0, 0]}, r"rewards must be \[2, 3\]"
    yield "compute_advantages", "grpo", {**rewards, "group_ids": [0, 0, 1]}, "must have 2 ids, one for each row, got 3"
    yield "compute_advantages", "grpo", {**rewards, "group_ids": [0, 0.5]}, "integers or strings, one a row, got 0.5"
    yield "compute_advantages", "grpo", {**rewards, "group_ids": 7}, "group_ids must be a sequence"
    yield "compute_advantages", "grpo", {**rewards, "group_ids": "ab"}, "group_ids must be a sequence"


@pytest.mark.parametrize(("function", "name", "changed", "words"), list(refusals()))
def test_refusals(function: str, name: str, changed: dict[str, Any], words: str) -> None:
    given = OK if function == "policy_loss" else {"mask": OK["mask"]}
    with pytest.raises(ValueError, match=rf"^[^\n]*{words}[^\n]*$"):
        getattr(F, function)(name, **{**given, **changed})


def test_more_refusals() -> None:
    two = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="clip must be above 0, got 0"):
        F.value_loss(values=two, old_values=two, returns=two, mask=OK["mask"], clip=0)
    with pytest.raises(ValueError, match=r"one shape, got \[2, 3\] and \[2\]"):
        F.kl("k1", two, torch.zeros(2))
    with pytest.raises(ConfigError, match="unknown .*'k4'"):
        F.kl("k4", two, two)
    with pytest.raises(ConfigError, match=r"^rollout_weights\.reject_high: needed"):
        F.rollout_weights(two, two, OK["mask"], reject="token")
    with pytest.raises(ConfigError, match=r"^rollout_weights\.capp: unknown key \(did you mean 'cap'"):
        F.rollout_weights(two, two, OK["mask"], capp=2.0)
    with pytest.raises(ValueError, match=r"rollout_logprobs .*\[2, 3\], got \[2, 2\]"):
        F.rollout_weights(two, two[:, :2], OK["mask"])


def test_reward_parts_and_greedy_rewards_are_checked() -> None:
    given: dict[str, Any] = {"rewards": torch.zeros(2), "mask": OK["mask"], "group_ids": [0, 0]}
    with pytest.raises(ValueError, match=r"'gdpo' needs reward_parts, reward_weights"):
        F.compute_advantages("gdpo", **given)
    with pytest.raises(ValueError, match=r"reward_parts must be \[2, K\], got shape \[3, 2\]"):
        F.compute_advantages("gdpo", reward_parts=torch.ones(3, 2), reward_weights=torch.ones(2), **given)
    with pytest.raises(ValueError, match=r"reward_weights must be \[2\] or \[2, 2\], got shape \[3\]"):
        F.compute_advantages("gdpo", reward_parts=torch.ones(2, 2), reward_weights=torch.ones(3), **given)
    with pytest.raises(ValueError, match=r"greedy_rewards must have one value for each of 2 rows"):
        F.compute_advantages("remax", greedy_rewards=torch.ones(3), **given)


def test_group_ids_may_be_a_tensor_an_array_or_strings() -> None:
    rewards, mask = torch.tensor([1.0, 0.0, 3.0, 5.0]), torch.ones(4, 2)
    ids = [7, 3, 7, 3]
    want, _ = F.compute_advantages("grpo", rewards=rewards, mask=mask, group_ids=ids)
    for same in (torch.tensor(ids), np.array(ids), [f"q{i}" for i in ids], tuple(ids)):
        got, _ = F.compute_advantages("grpo", rewards=rewards, mask=mask, group_ids=same)
        assert torch.equal(got, want)
    assert want[0, 0] < 0 < want[2, 0]


def test_import_brings_neither_transformers_nor_ray() -> None:
    code = "import sys, verl.algos.functional; print(sorted({'transformers', 'ray'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[]"
