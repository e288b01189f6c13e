"""Walks over the registries and presets: what holds for every entry, so that a new one is covered by being there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algos.walk import (
    POISON,
    algorithm,
    current,
    gradient,
    make_batch,
    padded,
    poisoned,
    segments,
    update_columns,
)
from verl.algos.advantages import ADVANTAGES, CreditInputs
from verl.algos.aggregate import MODES, Aggregation, Denominators
from verl.algos.kl import KL_ESTIMATORS, kl_values
from verl.algos.policy_losses import POLICY_LOSSES, PolicyInputs
from verl.algos.presets import PRESETS
from verl.algos.segments import Segments
from verl.core.batch import Batch

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_tis": {"level": "token"},
    "sequence_tis_normalized": {"level": "sequence", "normalize": True},
    "token_icepop": {"level": "token", "kind": "icepop", "low": 0.9, "high": 1.1},
    "reject_token": {"reject": "token", "reject_high": 1.1},
    "reject_sequence": {"level": "token", "reject": "sequence_mean", "statistic": "k2", "reject_high": 0.01},
    "bypass": {"old_logprobs": "bypass"},
}


def credit_inputs(batch: Batch) -> CreditInputs:
    s = segments(batch)
    token_rewards = torch.where(s.last(), batch["reward"][s.seq], batch["values"])
    names = ("values", "greedy_reward", "reward_parts", "reward_weights", "old_logprobs", "sum_pi_squared")
    return CreditInputs(s, token_rewards, batch["group_id"], **{n: batch[n] for n in names})


def credit(name: str, batch: Batch) -> Tensor:
    """[2, T] advantages and returns (0 where there are none) under the entry's default constants."""
    entry = ADVANTAGES[name]
    config = entry.config() if entry.config is not None else None
    advantages, returns = entry.fn(credit_inputs(batch), config)
    return torch.stack([advantages, torch.zeros_like(advantages) if returns is None else returns])


def loss_of(name: str, s: Segments, logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(token losses, gradient of their sum)."""
    entry = POLICY_LOSSES[name]
    config = entry.config() if entry.config is not None else None
    leaf = logprobs.clone().requires_grad_()
    chosen = None
    if entry.prepare is not None:
        chosen = entry.prepare(PolicyInputs(s, leaf.detach(), old, advantages), config, 3)
    loss, _ = entry.fn(PolicyInputs(s, leaf, old, advantages, chosen), config)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("name", ADVANTAGES.names())
@pytest.mark.parametrize("poison", POISON)
def test_advantage_ignores_what_is_not_counted(name: str, poison: float) -> None:
    batch = make_batch()
    got = credit(name, poisoned(batch, poison))
    assert torch.equal(got, credit(name, batch))
    assert torch.isfinite(got).all() and not got[:, ~segments(batch).mask].any()


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_advantage_does_not_depend_on_order_or_padding(name: str) -> None:
    batch = make_batch(1)
    want = credit(name, batch)
    order = np.random.default_rng(0).permutation(batch.num_seqs)
    places = torch.cat([batch.per_seq(torch.arange(batch.num_tokens))[i] for i in order])
    torch.testing.assert_close(credit(name, batch.take(order.tolist())), want[:, places], rtol=1e-5, atol=1e-5)
    wide, place = padded(batch, 4)
    torch.testing.assert_close(credit(name, wide)[:, place], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_excluded_rows_move_nobody(name: str) -> None:
    batch = make_batch(2)
    want = credit(name, batch)
    stays = torch.nonzero(segments(batch).counts > 0).squeeze(1).tolist()
    assert len(stays) == batch.num_seqs - 2
    places = torch.cat([batch.per_seq(torch.arange(batch.num_tokens))[i] for i in stays])
    torch.testing.assert_close(credit(name, batch.take(stays)), want[:, places], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_advantage_of_an_empty_group_and_an_empty_batch(name: str) -> None:
    batch = make_batch(3)
    for gone in (batch["group_id"] == 14, torch.ones(batch.num_seqs, dtype=torch.bool)):
        got = credit(name, batch.with_(excluded=gone))
        assert torch.isfinite(got).all() and not got[:, gone[batch.seq_of_token]].any()


# Not optimal_token_baseline: behind the second-longest sample its baseline is 0 by definition.
@pytest.mark.parametrize("name", [n for n in ADVANTAGES.names() if n != "optimal_token_baseline"])
@pytest.mark.parametrize("size", [0.1, 100.1, 12345.678])
def test_equal_rewards_teach_nothing(name: str, size: float) -> None:
    """Rounding of a mean, divided by a deviation of almost nothing, must not look like an advantage."""
    batch = make_batch(11)
    n = batch.num_seqs
    same = torch.full((n,), size)
    parts, nothing = torch.full((n, 3), size), torch.zeros(batch.num_tokens)
    batch = batch.with_(reward=same, greedy_reward=same, reward_parts=parts, values=nothing)
    entry = ADVANTAGES[name]
    alone = torch.isin(batch["group_id"], torch.tensor([0]))  # a group of one has nothing to compare with
    keep = torch.nonzero(~alone).squeeze(1).tolist()
    x = credit_inputs(batch.take(keep))
    config = entry.config(lam=1.0) if name == "gae" else entry.config() if entry.config is not None else None
    assert float(entry.fn(x, config)[0].abs().max()) <= 1e-5 * size


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
@pytest.mark.parametrize("poison", POISON)
def test_policy_loss_ignores_what_is_not_counted(name: str, poison: float) -> None:
    batch = make_batch(4)
    bad, s = poisoned(batch, poison), segments(batch)
    moved = torch.where(s.mask, current(batch), torch.tensor(poison))
    loss, slope = loss_of(name, s, moved, bad["old_logprobs"], bad["values"])
    want, want_slope = loss_of(name, s, current(batch), batch["old_logprobs"], batch["values"])
    assert torch.equal(loss, want) and torch.equal(slope, want_slope)
    assert not loss[~s.mask].any() and not slope[~s.mask].any()


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
@pytest.mark.parametrize("gap", [-100.0, 100.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_policy_loss_is_finite_at_a_gap_of_100(name: str, gap: float, sign: float) -> None:
    batch = make_batch(5)
    s, base = segments(batch), torch.full((batch.num_tokens,), -100.5)
    new, old = (base, base - gap) if gap < 0 else (base + gap, base)
    loss, slope = loss_of(name, s, new, old, sign * batch["values"].abs())
    assert torch.isfinite(loss).all() and torch.isfinite(slope).all()


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_policy_loss_of_nothing(name: str) -> None:
    batch = make_batch(6)
    s = Segments.of(batch.cu_seqlens, torch.zeros(batch.num_tokens, dtype=torch.bool))
    loss, slope = loss_of(name, s, current(batch), batch["old_logprobs"], batch["values"])
    assert not loss.any() and not slope.any()


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
@pytest.mark.parametrize("through", ["", "+"])
def test_kl_is_finite_at_a_gap_of_100(name: str, through: str) -> None:
    for gap in (-100.0, 100.0):
        leaf = torch.tensor([gap], requires_grad=True)
        value = kl_values(name + through, leaf, torch.zeros(1))
        value.sum().backward()
        assert torch.isfinite(value).all() and leaf.grad is not None and torch.isfinite(leaf.grad).all()


def splits(n: int) -> list[list[list[int]]]:
    """Ways to compute a mini-batch: at once, by row, in two ranks of unequal micro-batches, one part all-masked."""
    rng = np.random.default_rng(1)
    order = rng.permutation(n).tolist()
    return [
        [list(range(n))],
        [[i] for i in range(n)],
        [order[:3], order[3:4], order[4:]],
        [order[0::2], order[1::2]],
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_is_that_of_every_split(preset: str, mode: str) -> None:
    algo = algorithm(preset, aggregation=mode, entropy_coef=0.01)
    batch = update_columns(algo, make_batch(7))
    logprobs = current(batch)
    ways = [gradient(algo, batch, logprobs, parts) for parts in splits(batch.num_seqs)]
    loss, slope, metrics = ways[0]
    assert slope.abs().sum() > 0
    for other, other_slope, other_metrics in ways[1:]:
        torch.testing.assert_close(other, loss, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other_slope, slope, rtol=1e-9, atol=1e-12)
        assert other_metrics.values_by_name() == pytest.approx(metrics.values_by_name(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_does_not_depend_on_padding_or_poison(preset: str) -> None:
    algo = algorithm(preset, entropy_coef=0.01)
    start = make_batch(8)
    batch = update_columns(algo, start)
    loss, slope, _ = gradient(algo, batch, current(batch), [list(range(batch.num_seqs))])
    wide, place = padded(start, 5)
    wide = update_columns(algo, wide)
    other, other_slope, _ = gradient(algo, wide, current(wide), splits(wide.num_seqs)[2])
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(other_slope[:, place], slope, rtol=1e-6, atol=1e-8)
    bad = update_columns(algo, poisoned(start, float("nan")))
    assert torch.equal(bad["loss_mask"], batch["loss_mask"])
    for name in ("advantages", "returns", "rollout_weights"):
        if name in batch:
            assert torch.equal(bad[name], batch[name]), name
    logprobs = torch.where(bad["loss_mask"], current(batch), torch.tensor(float("nan")))
    third, third_slope, _ = gradient(algo, bad, logprobs, [list(range(bad.num_seqs))])
    assert torch.equal(third, loss) and torch.equal(third_slope, slope)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("preset", ["ppo", "grpo", "dapo", "gspo", "scale_rl"])
def test_rollout_correction_keeps_the_law_of_splits(preset: str, correction: str) -> None:
    algo = algorithm(preset, rollout_correction=CORRECTIONS[correction])
    batch = update_columns(algo, make_batch(9, spread=1.0))
    plain = update_columns(algorithm(preset), make_batch(9, spread=1.0))
    ways = [gradient(algo, batch, current(plain), parts) for parts in splits(batch.num_seqs)]
    for _, slope, _ in ways[1:]:
        torch.testing.assert_close(slope, ways[0][1], rtol=1e-9, atol=1e-12)
    without = gradient(algorithm(preset), plain, current(plain), splits(batch.num_seqs)[0])[1]
    assert not torch.allclose(without, ways[0][1])
    if "reject" in correction:
        gone = plain["loss_mask"] & ~batch["loss_mask"]
        assert gone.any() and not ways[0][1][:, gone].any()


def test_rejected_tokens_leave_the_denominator() -> None:
    """One token of a far ratio rejected: the others are averaged over one token less (the mean, not its share)."""
    batch = make_batch(10)
    far = int(torch.nonzero(segments(batch).mask)[0])
    rollout = batch["old_logprobs"].clone()
    rollout[far] -= 3.0
    algo = algorithm("dapo", rollout_correction={"reject": "token", "reject_high": 2.0})
    done = update_columns(algo, batch.with_(rollout_logprobs=rollout))
    counted = int(segments(batch).mask.sum())
    total = Denominators.of(Segments.of(done.cu_seqlens, done["loss_mask"]))
    assert total.tokens == counted - 1 and not done["loss_mask"][far]
    s = Segments.of(done.cu_seqlens, done["loss_mask"])
    assert float(Aggregation("token_mean")(torch.ones(done.num_tokens), s, total)) == pytest.approx(1.0)
