"""What must be true on policy, whatever the implementation: gradients of KL estimators, and that KL alone lowers KL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algos.walk import algorithm
from verl.algos.aggregate import Denominators
from verl.algos.kl import kl_values
from verl.algos.segments import Segments
from verl.core.batch import Batch, cumulative

VOCAB = 7


def laws(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a policy (with gradient) and of a reference."""
    generator = torch.Generator().manual_seed(seed)
    policy = torch.randn(VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    return policy, torch.randn(VOCAB, generator=generator, dtype=torch.float64)


def reverse_kl(policy: Tensor, reference: Tensor) -> Tensor:
    log_p = torch.log_softmax(policy, -1)
    return (log_p.exp() * (log_p - torch.log_softmax(reference, -1))).sum()


def slope(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value, leaf)[0]


def expected(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """E over the policy's own samples of the estimator, as a loss: the law of sampling carries no gradient."""
    log_p, log_q = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1)
    return (log_p.exp().detach() * kl_values(name, log_p, log_q)).sum()


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+", "abs+"])
def test_as_a_loss_the_gradient_is_that_of_the_reverse_kl(name: str) -> None:
    policy, reference = laws(0)
    got = slope(expected(name, policy, reference), policy)
    torch.testing.assert_close(got, slope(reverse_kl(policy, reference), policy), rtol=1e-10, atol=1e-12)


def test_k1_as_a_loss_has_no_gradient_and_k3_that_of_the_forward_kl() -> None:
    policy, reference = laws(1)
    assert slope(expected("k1", policy, reference), policy).abs().max() < 1e-12
    forward = (torch.softmax(reference, -1) * -torch.log_softmax(policy, -1)).sum()
    got = slope(expected("k3", policy, reference), policy)
    torch.testing.assert_close(got, slope(forward, policy), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_value_of_the_reverse_kl(name: str) -> None:
    policy, reference = laws(2)
    got, want = expected(name, policy, reference), reverse_kl(policy, reference)
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-10, atol=1e-12)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"place": "loss", "coef": 1.0, "estimator": "k2"}),
    ("grpo", {"place": "loss", "coef": 1.0, "estimator": "k3"}),
    ("grpo", {"place": "loss", "coef": 1.0, "estimator": "k1+"}),
    ("gspo", {"place": "loss", "coef": 1.0, "estimator": "k3+"}),
    ("ppo", {"place": "reward", "coef": 1.0, "estimator": "k1"}),
    ("reinforce_pp", {"place": "reward", "coef": 1.0, "estimator": "k1"}),
    ("rloo", {"place": "reward", "coef": 1.0, "estimator": "k1"}),
]


@pytest.mark.parametrize("preset,kl", CASES)
def test_one_update_with_nothing_but_kl_lowers_kl(preset: str, kl: dict[str, Any]) -> None:
    algo = algorithm(preset, kl=kl)
    policy, reference = laws(3)
    rng = np.random.default_rng(0)
    prompts, samples, length = 64, 8, 5
    rows = prompts * samples
    law = torch.softmax(policy.detach(), -1).numpy()
    tokens = torch.from_numpy(rng.choice(VOCAB, size=rows * length, p=law))
    first = torch.arange(rows * length) % length == 0
    old = torch.log_softmax(policy.detach(), -1)[tokens].float()
    batch = Batch(
        cumulative(torch.full((rows,), length)),
        {
            "loss_mask": ~first,
            "rollout_logprobs": old,
            "old_logprobs": old,
            "ref_logprobs": torch.log_softmax(reference, -1)[tokens].float(),
            "values": torch.zeros(rows * length),
            "group_id": torch.arange(rows) // samples,
            "reward": torch.zeros(rows),
        },
    )
    batch, _ = algo.credit(batch)
    total = Denominators.of(Segments.of(batch.cu_seqlens, batch["loss_mask"]), batch["group_id"])
    loss, _ = algo.actor_loss(torch.log_softmax(policy, -1)[tokens], None, batch, total)
    moved = policy.detach() - 0.05 * slope(loss, policy)
    assert reverse_kl(moved, reference) < reverse_kl(policy, reference).detach() - 1e-4
