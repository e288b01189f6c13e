"""verl.algos.functional and pass_at_k refuse in one line that says what was given and what is expected."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from verl.algos import functional as F
from verl.core.errors import ConfigError

NAN, INF = float("nan"), float("inf")

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
        "length must be a whole number, at least 1, got 0",
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
    with pytest.raises(ValueError, match="clip must be a finite number above 0, got 0"):
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
    with pytest.raises(ValueError, match=r"reward_parts must be \[2, K\], K at least 1, got shape \[3, 2\]"):
        F.compute_advantages("gdpo", reward_parts=torch.ones(3, 2), reward_weights=torch.ones(2), **given)
    with pytest.raises(ValueError, match=r"reward_weights must be \[2\] or \[2, 2\], got shape \[3\]"):
        F.compute_advantages("gdpo", reward_parts=torch.ones(2, 2), reward_weights=torch.ones(3), **given)
    with pytest.raises(ValueError, match=r"greedy_rewards must have one value for each of 2 rows"):
        F.compute_advantages("remax", greedy_rewards=torch.ones(3), **given)


TWO = torch.zeros(2, 3)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "policy_loss": (F.policy_loss, {"name": "ppo_clip", **OK}),
    "compute_advantages": (
        F.compute_advantages,
        {"name": "grpo", "rewards": TWO, "mask": OK["mask"], "group_ids": [0, 0]},
    ),
    "value_loss": (F.value_loss, {"values": TWO, "old_values": TWO, "returns": TWO, "mask": OK["mask"]}),
    "aggregate": (F.aggregate, {"values": TWO, "mask": OK["mask"], "mode": "token_mean"}),
    "kl": (F.kl, {"name": "k3", "logprobs": TWO, "ref_logprobs": TWO, "mask": OK["mask"]}),
    "rollout_weights": (F.rollout_weights, {"old_logprobs": TWO, "rollout_logprobs": TWO, "mask": OK["mask"]}),
}
"""Function, and keywords with which it works."""
OPTIONAL = {("policy_loss", "old_logprobs"), ("kl", "mask")}
TENSORS = [(call, key) for call, (_, given) in CALLS.items() for key, x in given.items() if isinstance(x, torch.Tensor)]


def refused(call: str, words: str, **changed: Any) -> None:
    function, given = CALLS[call]
    with pytest.raises(ValueError, match=rf"^{call}[:.][^\n]*{words}[^\n]*$"):
        function(**{**given, **changed})


@pytest.mark.parametrize("call", CALLS)
def test_what_they_work_with(call: str) -> None:
    function, given = CALLS[call]
    function(**given)


@pytest.mark.parametrize(("call", "key"), TENSORS)
def test_a_column_is_a_real_tensor(call: str, key: str) -> None:
    if (call, key) not in OPTIONAL:
        refused(call, f"{key} must be a torch tensor, got None", **{key: None})
    refused(call, f"{key} must be a torch tensor, got list", **{key: [[0.0] * 3] * 2})
    refused(call, f"{key} must be a torch tensor, got ndarray", **{key: np.ones((2, 3))})
    refused(
        call, f"{key} must hold real numbers, got torch.complex64", **{key: torch.zeros(2, 3, dtype=torch.complex64)}
    )


@pytest.mark.parametrize("odd", [None, 3, ["ppo_clip"], b"k3", {}])
def test_a_name_is_a_string(odd: Any) -> None:
    for call in ("policy_loss", "compute_advantages", "kl"):
        refused(call, r"name must be a string, got .", name=odd)
    refused("aggregate", "mode must be a string, got .", mode=odd)
    for call in ("policy_loss", "value_loss"):
        refused(call, "aggregation must be a string, got .", aggregation=odd)


@pytest.mark.parametrize("odd", [0, -1, 2.5, 3.0, NAN, INF, "5", True, torch.tensor(5), [5]])
def test_a_length_is_a_whole_number(odd: Any) -> None:
    for call, key in (("aggregate", "mode"), ("policy_loss", "aggregation"), ("value_loss", "aggregation")):
        for mode in ("seq_mean_token_sum_norm", "token_mean"):
            refused(call, "length must be a whole number, at least 1, got .", length=odd, **{key: mode})


@pytest.mark.parametrize(
    "odd", [0, -0.5, NAN, INF, np.float32(INF), np.float32(NAN), "0.5", None, True, torch.tensor(0.5), [0.5], 10**400]
)
def test_a_clip_is_a_finite_number_above_0(odd: Any) -> None:
    refused("value_loss", "clip must be a finite number above 0, got .", clip=odd)


@pytest.mark.parametrize("odd", [[None, None], [0, None], [0, 1.5], [b"a", b"b"], torch.tensor([[0], [1]])])
def test_group_ids_are_integers_or_strings(odd: Any) -> None:
    refused("compute_advantages", "group_ids must be integers or strings, one a row, got .", group_ids=odd)


def test_a_long_offender_is_shown_by_its_type() -> None:
    refused("compute_advantages", "got a value of type Tensor", group_ids=[torch.zeros(30, 30)] * 2)


@pytest.mark.parametrize("odd", [{0, 1}, frozenset((0, 1)), {0: "a", 1: "b"}, {0: "a", 1: "b"}.keys()])
def test_group_ids_have_an_order(odd: Any) -> None:
    refused("compute_advantages", "group_ids must be a sequence in the order of the rows, got a .", group_ids=odd)


def test_group_ids_are_no_bytes() -> None:
    refused("compute_advantages", "group_ids must be a sequence", group_ids=b"ab")


def test_value_loss_asks_for_the_groups_that_it_takes() -> None:
    refused("value_loss", "give group_ids", aggregation="prompt_mean")
    refused("value_loss", "must have 2 ids, one for each row, got 1", aggregation="prompt_mean", group_ids=[0])


def test_gdpo_needs_a_part() -> None:
    parts = {"reward_parts": torch.zeros(2, 0), "reward_weights": torch.zeros(0)}
    refused(
        "compute_advantages", r"reward_parts must be \[2, K\], K at least 1, got shape \[2, 0\]", name="gdpo", **parts
    )


def test_kl_refuses_other_shapes_and_masks() -> None:
    refused("kl", r"logprobs and ref_logprobs must have one shape, got \[2, 3\] and \[3\]", ref_logprobs=torch.zeros(3))
    refused("kl", r"logprobs and mask must have one shape, got \[2, 3\] and \[2, 1\]", mask=torch.ones(2, 1))
    refused("kl", "mask must hold 0 and 1 only", mask=torch.full((2, 3), 0.5))
    refused("kl", "mask is on meta, logprobs on cpu; move them together", mask=TWO.bool().to("meta"))


@pytest.mark.parametrize(
    ("n", "c", "k", "words"),
    [
        ([4, 4], [1, 2, 3], 1, r"n and c must broadcast, got shapes \(2,\) and \(3,\)"),
        ([4, 2.5], 1, 1, "n must be an integer or integers, got values that are not"),
        ([[4], [4, 4]], 1, 1, "n must be an integer or integers, got rows of unequal length"),
        (
            torch.tensor(4.0, dtype=torch.bfloat16),
            1,
            1,
            "n must be an integer or integers, got a tensor of torch.bfloat16",
        ),
        (4, torch.tensor([True]), 1, "c must be an integer or integers, got a tensor of torch.bool"),
        (4, None, 1, "c must be an integer or integers, got None"),
        (4, 2, "2", "k must be an integer or integers, got '2'"),
        (4, torch.tensor([1]), torch.tensor([1, 2]), r"k must be one integer, got an array of shape \(2,\)"),
        (4, [1], [1], r"k must be one integer, got an array of shape \(1,\)"),
        (4, torch.tensor([1]), torch.tensor(5), "needs at least k=5 samples of each prompt, got n=4"),
    ],
)
def test_pass_at_k_refuses(n: Any, c: Any, k: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^pass_at_k: [^\n]*{words}[^\n]*$"):
        F.pass_at_k(n, c, k)
