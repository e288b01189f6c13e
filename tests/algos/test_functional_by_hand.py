"""verl.algos.functional on cases small enough to know the answer: gradients, types, padding, groups."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verl.algos import functional as F
from verl.algos.aggregate import MODES
from verl.algos.kl import KL_ESTIMATORS
from verl.algos.policy_losses import POLICY_LOSSES

NAN, INF = float("nan"), float("inf")
ESTIMATORS = [n for name in KL_ESTIMATORS.names() for n in (name, name + "+")]
ODD = [NAN, INF, -INF]


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
    np.testing.assert_allclose(torch.autograd.grad(loss, p)[0], [[-1 / 6] * 3, [2 / 6] * 3], rtol=1e-6)


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
    given: dict[str, Any] = {
        "logprobs": torch.ones(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.ones(2),
        "mask": torch.ones(2, 3),
    }
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


def test_group_ids_may_be_a_tensor_an_array_or_strings() -> None:
    rewards, mask = torch.tensor([1.0, 0.0, 3.0, 5.0]), torch.ones(4, 2)
    ids = [7, 3, 7, 3]
    want, _ = F.compute_advantages("grpo", rewards=rewards, mask=mask, group_ids=ids)
    for same in (torch.tensor(ids), np.array(ids), [f"q{i}" for i in ids], tuple(ids)):
        got, _ = F.compute_advantages("grpo", rewards=rewards, mask=mask, group_ids=same)
        assert torch.equal(got, want)
    assert want[0, 0] < 0 < want[2, 0]


def padded(counted: list[float], odd: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """[1, 4] with two counted values at columns 0 and 2, and something odd in the others."""
    return torch.tensor([[counted[0], odd, counted[1], odd]], dtype=dtype)


COUNTED = torch.tensor([[1, 0, 1, 0]])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("odd", [(x, y) for x in [*ODD, -1.0] for y in [*ODD, -2.0]], ids=str)
def test_kl_with_a_mask_lets_nothing_through(name: str, odd: tuple[float, float]) -> None:
    p, q = padded([-1.0, -2.0], odd[0]).requires_grad_(), padded([-1.5, -1.0], odd[1])
    got = F.kl(name, p, q, mask=COUNTED)
    alone = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    want = F.kl(name, alone, torch.tensor([[-1.5, -1.0]], dtype=torch.float64))
    assert torch.equal(got[:, [0, 2]], want) and not got[:, [1, 3]].any()
    grad = torch.autograd.grad(F.aggregate(got, COUNTED, "token_sum"), p)[0]
    assert torch.equal(grad[:, [0, 2]], torch.autograd.grad(want.sum(), alone)[0]) and not grad[:, [1, 3]].any()


def test_kl_takes_a_mask_of_any_number_type() -> None:
    p, q = torch.tensor([-1.0, NAN]), torch.tensor([-2.0, NAN])
    for mask in ([True, False], [1, 0], [1.0, 0.0]):
        assert F.kl("k1", p, q, mask=torch.tensor(mask)).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_of_narrow_types_is_that_of_float32(narrow: torch.dtype, name: str) -> None:
    p, q = torch.tensor([[-1.0, -2.0, -0.5]], dtype=narrow), torch.tensor([[-1.055, -2.2, -400.0]], dtype=narrow)
    got = F.kl(name, p, q)
    assert got.dtype == torch.float32 and torch.equal(got, F.kl(name, p.float(), q.float()))


def test_kl_of_narrow_types_by_hand() -> None:
    near = F.kl("k3", torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-1.0546875], dtype=torch.bfloat16))
    assert near.item() == pytest.approx(np.exp(-0.0546875) + 0.0546875 - 1, rel=1e-4)
    far = F.kl("k2", torch.tensor([0.0], dtype=torch.float16), torch.tensor([-400.0], dtype=torch.float16))
    assert far.item() == 80000.0


@pytest.mark.parametrize("odd", ODD)
def test_what_stands_at_mask_0_has_no_gradient(odd: float) -> None:
    for name in POLICY_LOSSES.names():
        p, old = padded([-1.0, -2.0], odd).requires_grad_(), padded([-1.1, -1.9], odd)
        loss, _ = F.policy_loss(
            name, logprobs=p, old_logprobs=old, advantages=padded([1.0, -1.0], odd), mask=COUNTED, rollout_weights=old
        )
        grad = torch.autograd.grad(loss, p)[0]
        assert torch.isfinite(loss) and torch.isfinite(grad).all() and not grad[:, [1, 3]].any(), name
    v, old, target = padded([1.0, 2.0], odd).requires_grad_(), padded([1.1, 1.5], odd), padded([0.0, 3.0], odd)
    grad = torch.autograd.grad(F.value_loss(values=v, old_values=old, returns=target, mask=COUNTED)[0], v)[0]
    assert grad[0, 0] > 0 > grad[0, 2] and not grad[:, [1, 3]].any()


def test_value_loss_takes_the_mean_over_prompts() -> None:
    values, zero = torch.tensor([[2.0, 4.0], [6.0, 0.0], [4.0, 0.0]]), torch.zeros(3, 2)
    mask = torch.tensor([[1, 1], [1, 0], [1, 0]])
    loss, _ = F.value_loss(
        values=values,
        old_values=values,
        returns=zero,
        mask=mask,
        aggregation="prompt_mean",
        group_ids=["b", "a", "b"],
    )
    assert loss.item() == pytest.approx(((2**2 + 4**2 + 4**2) / 3 + 6**2) / 2 / 2)


def test_lengths_and_clips_may_be_numpy_numbers() -> None:
    values, mask = torch.tensor([[2.0, 4.0]]), torch.ones(1, 2)
    for length in (4, np.int64(4), np.uint8(4)):
        assert F.aggregate(values, mask, "seq_mean_token_sum_norm", length=length).item() == 1.5
    for clip in (1, 1.0, np.float32(1), np.int64(1)):
        loss, _ = F.value_loss(values=values, old_values=torch.zeros(1, 2), returns=values, mask=mask, clip=clip)
        assert loss.item() == pytest.approx((1**2 + 3**2) / 4)


def test_float8_is_computed_in_float32() -> None:
    narrow = torch.zeros(1, 2).to(torch.float8_e4m3fn)
    assert F.aggregate(narrow, torch.ones(1, 2), "token_mean").dtype == torch.float32


def test_pass_at_k_of_lists() -> None:
    want = [F.pass_at_k(8, c, 3) for c in (0, 2, 8)]
    for n in (8, [8, 8, 8], np.array([8, 8, 8])):
        got = F.pass_at_k(n, [0, 2, 8], 3)
        assert isinstance(got, np.ndarray) and got.dtype == np.float64 and got.tolist() == want
    assert F.pass_at_k([8, 8], 2, 3).tolist() == [want[1]] * 2
    tensor = F.pass_at_k([8, 8, 8], torch.tensor([0, 2, 8]), 3)
    assert isinstance(tensor, Tensor) and tensor.tolist() == want
    zero_d = F.pass_at_k(np.array(8), 2, 3)
    assert isinstance(zero_d, np.ndarray) and zero_d.shape == () and zero_d == want[1]


def test_pass_at_k_with_a_tensor_k() -> None:
    k: Any = torch.tensor(3)
    for c in (torch.tensor([0, 2, 8]), np.array([0, 2, 8]), [0, 2, 8]):
        assert F.pass_at_k(8, c, k).tolist() == F.pass_at_k(8, c, 3).tolist()
    assert isinstance(F.pass_at_k(8, 2, k), float)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("narrow", [torch.uint8, torch.int8, torch.int16])
def test_pass_at_k_of_narrow_integers(narrow: torch.dtype) -> None:
    n, c = torch.tensor([100, 100, 100], dtype=narrow), torch.tensor([0, 3, 99], dtype=narrow)
    assert F.pass_at_k(n, c, 90).tolist() == F.pass_at_k(n.long(), c.long(), 90).tolist()
    one = F.pass_at_k(n[0], c[2], 90)  # 100 - 99 - 2 wraps around in uint8, which numpy warns of where it is no array
    assert isinstance(one, Tensor) and one.item() == 1.0
    with pytest.raises(ValueError, match="needs at least k=200 samples of each prompt, got n=100"):
        F.pass_at_k(n, c, 200)
