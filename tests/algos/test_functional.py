"""verl.algos.functional: on padded tensors they give what the flat functions give, whatever the padding."""

import subprocess
import sys
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


def test_import_brings_neither_transformers_nor_ray() -> None:
    code = "import sys, verl.algos.functional; print(sorted({'transformers', 'ray'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.strip() == "[]"
