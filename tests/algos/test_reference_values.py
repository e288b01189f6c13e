"""Numbers of a reference framework (its version 0.9.1, float64 on CPU), reproduced through the public functions.

Where that framework departs from the formulas the case is in DEVIATIONS with the reason and the number of ours. Its
whitened outputs (gae, masked_whiten) were multiplied by the mask when the numbers were taken: it leaves values there.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from verl.algos.aggregate import Aggregation, Denominators
from verl.algos.functional import aggregate, compute_advantages, kl
from verl.algos.kl import KLController
from verl.algos.segments import Segments
from verl.config.algorithm import KLConfig

CASES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "reference" / "reference_values.json").read_text()
)
NAMES = {
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "grpo_vectorized": "grpo",
    "grpo_no_std": "grpo",
    "rloo_vectorized": "rloo",
}
"""Its name to ours, where they differ. Two of its estimators exist twice, as a loop and vectorised."""
DEVIATIONS: dict[str, tuple[str, Any]] = {
    "singleton_rloo": (
        "a group of one has nobody left to compare with: advantage 0, as in its own vectorised form; its loop form "
        "keeps the raw score 3",
        {"advantages": [[1.0], [-1.0], [0.0]]},
    ),
    "remax": (
        "it leaves the reward to go at mask 0 (row 0, column 2: 1.0 without the baseline); ours is 0 there",
        {
            "advantages": [
                [0.6, 0.6, 0, 0.5, 0.5, 0],
                [0.9, 0.9, 0.9, 0, 0, 0],
                [0.5] * 4 + [0] * 2,
                [-0.4] * 2 + [0] * 4,
            ],
            "returns": [[1.1, 1.1, 0, 1.0, 1.0, 0], [1, 1, 1, 0, 0, 0], [0.5] * 4 + [0] * 2, [-0.2] * 2 + [0] * 4],
        },
    ),
}
PADDED_WIDTH = 3
"""Its seq-mean-token-sum-norm divides by the width of the padding unless told a factor; here that width is given."""


def f64(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def credit(case: str, given: dict[str, Any]) -> dict[str, Any]:
    ours = NAMES.get(case.removeprefix("singleton_"), case.removeprefix("singleton_"))
    constants = {key: given[key] for key in ("gamma", "lam") if key in given}
    if case == "grpo_no_std":
        constants["normalize_by_std"] = False
    advantages, returns = compute_advantages(
        ours,
        rewards=f64(given["token_level_rewards"]),
        mask=torch.tensor(given["response_mask"]),
        group_ids=given["index"],
        values=f64(given["values"]) if "values" in given else None,
        greedy_rewards=f64(given["reward_baselines"]) if "reward_baselines" in given else None,
        **constants,
    )
    return {"advantages": advantages.tolist(), "returns": returns.tolist()}


def whitened(given: dict[str, Any]) -> dict[str, Any]:
    mask = torch.tensor(given["mask"], dtype=torch.bool)
    rows, width = mask.shape
    s = Segments(torch.arange(rows).repeat_interleave(width), mask.flatten(), rows)
    return {"out": s.whiten(f64(given["values"]).flatten()).view(rows, width).tolist()}


def distance(name: str, given: dict[str, Any]) -> dict[str, Any]:
    p = f64(given["logprob"]).requires_grad_()
    value = kl(name, p, f64(given["ref"]))
    (grad,) = torch.autograd.grad(value.sum(), p)
    return {"value": value.tolist(), "grad_logprob": grad.tolist()}


def reduced(mode: str, given: dict[str, Any]) -> float:
    """The global form: its data-parallel ranks average their gradients, so each scales its loss by dp_size; ours add.

    Its batch_num_tokens and global_batch_size are our Denominators.tokens and seqs, its loss_scale_factor our length:
    our share of this part, times dp_size, is its number.
    """
    loss, mask = f64(given["loss"]), torch.tensor(given["mask"])
    if given.get("local"):
        return float(aggregate(loss, mask, mode, length=PADDED_WIDTH))
    rows, width = mask.shape
    s = Segments(torch.arange(rows).repeat_interleave(width), mask.bool().flatten(), rows)
    total = Denominators(tokens=given["batch_num_tokens"], seqs=given["global_batch_size"])
    share = Aggregation(mode, given["loss_scale_factor"])(loss.flatten(), s, total)
    return float(share) * given["dp_size"]


def steered(given: dict[str, Any]) -> list[float]:
    controller = KLController(
        KLConfig(coef=given["init"], adaptive_target=given["target"], adaptive_horizon=given["horizon"])
    )
    out = []
    for measured, sequences in given["updates"]:
        controller.update(measured, sequences)
        out.append(controller.coef)
    return out


def ours(case: str) -> Any:
    given = CASES[case]["in"]
    if case == "adaptive_kl":
        return steered(given)
    if case == "masked_whiten":
        return whitened(given)
    if case.startswith("kl_"):
        return distance(case.removeprefix("kl_"), given)
    if case.startswith("agg_"):
        return reduced(case.removeprefix("agg_").removeprefix("global_").replace("-", "_"), given)
    return credit(case, given)


def close(got: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return all(close(got[key], value) for key, value in want.items())
    return torch.allclose(f64(got), f64(want), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("case", [c for c in CASES if c not in DEVIATIONS])
def test_reproduced(case: str) -> None:
    assert close(ours(case), CASES[case]["out"]), (ours(case), CASES[case]["out"])


@pytest.mark.parametrize("case", DEVIATIONS)
def test_deviations_deviate_and_are_as_stated(case: str) -> None:
    reason, want = DEVIATIONS[case]
    got = ours(case)
    assert not close(got, CASES[case]["out"]), f"{case} is reproduced; take it off the list ({reason})"
    assert close(got, want)


def test_our_norm_does_not_see_the_padding() -> None:
    given = CASES["agg_seq-mean-token-sum-norm"]["in"]
    loss, mask = f64(given["loss"]), torch.tensor(given["mask"])
    wide = [torch.nn.functional.pad(x, (0, 4), value=1.0 if x is loss else 0) for x in (loss, mask)]
    a, b = (aggregate(x, m, "seq_mean_token_sum_norm", length=3) for x, m in ((loss, mask), wide))
    assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_rewards_at_mask_0_count_for_nothing(case: str) -> None:
    """It sums them into the score. No case has one, so its numbers cannot show it; ours are the same with one."""
    given = json.loads(json.dumps(CASES[case]["in"]))
    given["token_level_rewards"][0][2] = 50.0
    given["token_level_rewards"][1][5] = float("nan")
    assert close(credit(case, given), CASES[case]["out"])


def test_whiten_of_fewer_than_two_tokens_is_no_error() -> None:
    """It raises there."""
    assert whitened({"values": [[3.0, 5.0]], "mask": [[0, 1]]}) == {"out": [[0.0, 0.0]]}
