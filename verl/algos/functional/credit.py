"""Advantages on padded tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algos.advantages import ADVANTAGES, CreditInputs
from verl.algos.functional.given import word
from verl.algos.functional.padded import Padded
from verl.config.base import Component
from verl.config.loader import constants as checked
from verl.core.registry import Entry


def compute_advantages(
    name: str,
    *,
    rewards: Tensor,
    mask: Tensor,
    group_ids: Any = None,
    values: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
    reward_parts: Tensor | None = None,
    reward_weights: Tensor | None = None,
    logprobs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    **constants: Any,
) -> tuple[Tensor, Tensor]:
    """(advantages [B, T], returns [B, T]), both 0 where the mask is 0, without gradient.

    rewards [B, T], or [B]: a score of the whole response, which goes to its last token of mask 1. group_ids: prompt of
    each row, B integers or strings in any order; estimators that compare the samples of a prompt need it. A row without
    a counted token is in nobody's statistics. returns: what a critic should learn to predict, of an estimator that has
    such (gae: A + V before whitening); else the sum of rewards from the token on, undiscounted, over counted tokens.

    Read only by the estimators that need them: values [B, T] (gae); greedy_rewards [B], score of the prompt's greedy
    response (remax); reward_parts [B, K] with reward_weights [K] or [B, K] (gdpo, which reads these instead of
    rewards); logprobs [B, T] before the update and sum_pi_squared [B, T], the sum over the vocabulary of squared
    probabilities (optimal_token_baseline, which compares the rows of a prompt column by column: let their responses
    begin at one column). constants: of the named estimator (gamma, lam, normalize_by_std ...).
    """
    word("compute_advantages: name", name)
    entry = ADVANTAGES[name]
    numbers = checked(Component(name=name, **constants), entry.config, name)
    token_columns = {"values": values, "logprobs": logprobs, "sum_pi_squared": sum_pi_squared}
    row_columns = {"greedy_rewards": greedy_rewards, "reward_parts": reward_parts, "reward_weights": reward_weights}
    _present(entry, {"group_ids": group_ids, **token_columns, **row_columns})
    pad = Padded.of("compute_advantages", mask, {**token_columns, **row_columns}, rewards=rewards)
    flat = {key: None if x is None else pad.tokens(key, x) for key, x in token_columns.items()}
    parts, weights = _parts(pad, reward_parts, reward_weights)
    token_rewards = _token_rewards(pad, rewards)
    with torch.no_grad():
        advantages, returns = entry.fn(
            CreditInputs(
                pad.segments,
                token_rewards,
                pad.groups(group_ids),
                values=flat["values"],
                greedy_reward=None if greedy_rewards is None else pad.rows("greedy_rewards", greedy_rewards),
                reward_parts=parts,
                reward_weights=weights,
                old_logprobs=flat["logprobs"],
                sum_pi_squared=flat["sum_pi_squared"],
            ),
            numbers,
        )
        goes = pad.segments.zero(token_rewards)
    return pad.padded(advantages), _reward_to_go(pad, goes) if returns is None else pad.padded(returns)


KEYWORDS = {"group_id": "group_ids", "greedy_reward": "greedy_rewards", "old_logprobs": "logprobs"}
"""Column of a batch to keyword, where they differ: here a name has an s where it holds a value for each row."""


def _present(entry: Entry[Any], given: dict[str, Any]) -> None:
    needed = [KEYWORDS.get(column, column) for column in entry.needs]
    missing = [key for key in needed if given.get(key) is None]
    if not missing:
        return
    why = " compares the samples of a prompt and" if missing[0] == "group_ids" else ""
    raise ValueError(f"compute_advantages: {entry.name!r}{why} needs {', '.join(missing)}; give {missing[0]}=...")


def _token_rewards(pad: Padded, rewards: Tensor) -> Tensor:
    if rewards.ndim == 1:
        spread = pad.spread("rewards", rewards)
        return torch.where(pad.segments.last(), spread, torch.zeros_like(spread)).detach()
    return pad.spread("rewards", rewards).detach()


def _parts(pad: Padded, parts: Tensor | None, weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if parts is None or weights is None:
        return None, None
    rows = pad.shape[0]
    if parts.ndim != 2 or len(parts) != rows or parts.shape[1] < 1:
        raise ValueError(
            f"compute_advantages: reward_parts must be [{rows}, K], K at least 1, got shape {list(parts.shape)}"
        )
    if weights.shape not in (parts.shape, parts.shape[1:]):
        raise ValueError(
            f"compute_advantages: reward_weights must be [{parts.shape[1]}] or {list(parts.shape)}, got shape "
            f"{list(weights.shape)}"
        )
    return parts.to(pad.dtype).detach(), weights.to(pad.dtype).expand(parts.shape).detach()


def _reward_to_go(pad: Padded, rewards: Tensor) -> Tensor:
    """[B, T] sum of the counted rewards from each counted token to the end of its row."""
    sums = pad.padded(rewards).flip(1).cumsum(1).flip(1)
    return torch.where(pad.padded(pad.segments.mask), sums, torch.zeros_like(sums))
