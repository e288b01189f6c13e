"""A function of a user's that breaks its contract is told so in one line, before it trains anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.algos.walk import current, make_batch
from verl.algos.advantages import ADVANTAGES
from verl.algos.aggregate import Denominators
from verl.algos.algorithm import Algorithm
from verl.algos.policy_losses import POLICY_LOSSES
from verl.algos.presets import preset_values
from verl.algos.segments import Segments
from verl.config import resolve
from verl.core.errors import ConfigError
from verl.core.metrics import Metrics

Register = Callable[..., Algorithm]


@pytest.fixture
def use() -> Iterator[Register]:
    """use("advantage" or "policy_loss", fn, **registration) -> an Algorithm with that function."""
    made: list[Any] = []

    def register(kind: str, fn: Callable[..., Any], **registration: Any) -> Algorithm:
        registry: Any = ADVANTAGES if kind == "advantage" else POLICY_LOSSES
        registry.register("of_a_test", **registration)(fn)
        made.append(registry)
        return Algorithm(resolve([{"algorithm": {"name": "grpo", kind: "of_a_test"}}], preset_values()))

    yield register
    for registry in made:
        del registry._entries["of_a_test"]


def loss_of(algo: Algorithm) -> torch.Tensor:
    batch, _ = algo.credit(make_batch())
    s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
    return algo.actor_loss(current(batch).requires_grad_(), None, batch, Denominators.of(s))[0]


@pytest.mark.parametrize(
    "fn,message",
    [
        (lambda x, c: x.rewards, "must return (advantages, returns or None), it returned a Tensor"),
        (lambda x, c: (None, None), "must give advantages as a float tensor of one number a token"),
        (lambda x, c: (x.rewards[:3], None), "must give advantages as a float tensor"),
        (lambda x, c: (x.rewards.long(), None), "it gave torch.int64"),
        (lambda x, c: (x.rewards, x.group), "must give returns as a float tensor"),
        (lambda x, c: (x.rewards / 0, None), "gave advantages that are not finite from inputs that are"),
    ],
)
def test_advantages(use: Register, fn: Callable[..., Any], message: str) -> None:
    algo = use("advantage", fn)
    with pytest.raises(ConfigError) as caught:
        algo.credit(make_batch())
    assert str(caught.value).startswith("algorithm.advantage: 'of_a_test' ") and message in str(caught.value)


@pytest.mark.parametrize(
    "fn,message",
    [
        (lambda x, c: x.logprobs, "must return (token losses, Metrics)"),
        (lambda x, c: (x.logprobs.sum(), Metrics()), "must give losses as a float tensor of one number a token"),
        (lambda x, c: (x.logprobs.detach(), Metrics()), "gave losses without a gradient"),
        (lambda x, c: (x.logprobs, {}), "must return verl.core.metrics.Metrics beside the losses"),
    ],
)
def test_losses(use: Register, fn: Callable[..., Any], message: str) -> None:
    algo = use("policy_loss", fn)
    with pytest.raises(ConfigError) as caught:
        loss_of(algo)
    assert str(caught.value).startswith("algorithm.policy_loss: 'of_a_test' ") and message in str(caught.value)


def test_registration(use: Register) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm.advantage: .*needs='valuez' \(did you mean 'values'\?\)"):
        use("advantage", lambda x, c: (x.rewards, None), needs=("valuez",))
    with pytest.raises(ConfigError, match=r"^algorithm.policy_loss: .*needs='ref_logprobs'.*old_logprobs"):
        use("policy_loss", lambda x, c: (x.logprobs, Metrics()), needs=("ref_logprobs",))


def test_config_must_be_a_section(use: Register) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm.advantage: .*config=<class 'dict'>; give a subclass"):
        use("advantage", lambda x, c: (x.rewards, None), config=dict)


def test_a_diverged_model_is_not_the_estimators_fault(use: Register) -> None:
    algo = use("advantage", lambda x, c: (x.rewards, None))
    algo.credit(make_batch().with_(reward=torch.full((14,), float("nan"))))
    assert torch.isfinite(loss_of(algo))
