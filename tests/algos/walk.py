"""Material of the walks: one random batch that has everything that can go wrong in its shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.aggregate import Denominators
from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.algos.segments import Segments
from verl.config import resolve
from verl.core.batch import Batch, cumulative
from verl.core.columns import SCHEMA
from verl.core.metrics import Metrics

GROUP_SIZES = (1, 2, 3, 4, 4)
POISON = (float("nan"), float("inf"), float("-inf"), 1e30)


def algorithm(preset: str, **sections: Any) -> Algorithm:
    """The preset's algorithm; sections of `algorithm` laid over it."""
    return Algorithm(resolve([{"algorithm": {"name": preset, **sections}}], preset_values()))


def make_batch(seed: int = 0, spread: float = 0.5) -> Batch:
    """Groups of 1, 2, 3, 4, 4 with shuffled rows, masks with holes, one row without a counted token, one excluded."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(len(GROUP_SIZES)) * 7, GROUP_SIZES))
    n = len(group)
    lengths = rng.integers(3, 9, n)
    total = int(lengths.sum())
    mask = rng.random(total) < 0.7
    mask[np.cumsum(lengths) - lengths] = False  # position 0 never trains
    seq = np.repeat(np.arange(n), lengths)
    whole = np.flatnonzero(group == 21)
    mask[seq == whole[0]] = False
    excluded = np.zeros(n, dtype=bool)
    excluded[whole[1]] = True

    def token(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.from_numpy(rng.normal(size=total) * scale + shift).float()

    old = token(spread, -1.5)
    cols = {
        "loss_mask": torch.from_numpy(mask),
        "rollout_logprobs": old + token(spread / 4),
        "old_logprobs": old,
        "ref_logprobs": old + token(spread),
        "values": token(),
        "sum_pi_squared": torch.from_numpy(rng.random(total)).float(),
        "group_id": torch.from_numpy(group),
        "reward": torch.from_numpy(rng.normal(size=n)).float(),
        "greedy_reward": torch.from_numpy(rng.normal(size=n)).float(),
        "reward_parts": torch.from_numpy(rng.normal(size=(n, 3))).float(),
        "reward_weights": torch.tensor([[1.0, 0.5, -0.25]]).repeat(n, 1),
        "excluded": torch.from_numpy(excluded),
    }
    return Batch(cumulative(torch.from_numpy(lengths)), cols)


def poisoned(batch: Batch, value: float) -> Batch:
    """`value` in every float token column where nothing is counted, and in every float column of a row without any."""
    out = segments(batch)
    row = out.counts > 0
    cols = {}
    for name, col in batch.cols.items():
        if not col.is_floating_point():
            cols[name] = col
        else:
            good = out.mask if SCHEMA[name].level == "token" else row
            shape = (-1,) + (1,) * (col.ndim - 1)
            cols[name] = torch.where(good.reshape(shape), col, torch.tensor(value))
    return Batch(batch.cu_seqlens, cols)


def padded(batch: Batch, extra: int, value: float = 3.0) -> tuple[Batch, Tensor]:
    """`extra` tokens that are not counted behind every sequence, and where the old tokens went [T]."""
    lengths = batch.lengths + extra
    cu = cumulative(lengths)
    place = torch.arange(batch.num_tokens) + batch.seq_of_token * extra
    cols = {}
    for name, col in batch.cols.items():
        if SCHEMA[name].level == "token":
            fill = False if col.dtype == torch.bool else value
            wide = torch.full((int(cu[-1]),), fill, dtype=col.dtype)
            wide[place] = col
            col = wide
        cols[name] = col
    return Batch(cu, cols), place


def segments(batch: Batch) -> Segments:
    """What is counted, excluded rows not."""
    s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
    return Segments(s.seq, s.mask & ~batch["excluded"][s.seq], s.num_seqs) if "excluded" in batch else s


def update_columns(algo: Algorithm, batch: Batch) -> Batch:
    """After credit, with what the loss reads beside (the choice of tokens)."""
    done, _ = algo.credit(batch)
    if algo.policy_loss.prepare is not None:
        done = algo.prepare(done, current(done), seed=5)
    return done


def current(batch: Batch) -> Tensor:
    """Log-probs of a policy that has moved a little since, a function of the old ones alone."""
    old = batch["old_logprobs"]
    return torch.where(batch["loss_mask"], old + 0.3 * torch.sin(1000 * old), old)


def gradient(
    algo: Algorithm, batch: Batch, logprobs: Tensor, parts: list[list[int]], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Metrics]:
    """(loss, gradient [2, T] on log-probs and entropies, metrics) of a mini-batch that is computed in parts."""
    leaf = logprobs.to(dtype).requires_grad_()
    entropy = torch.cos(logprobs.to(dtype)).requires_grad_()
    total = Denominators.of(Segments.of(batch.cu_seqlens, batch["loss_mask"]), batch["group_id"])
    places = batch.per_seq(torch.arange(batch.num_tokens))
    losses, seen = [], []
    for index in parts:
        where = torch.cat([places[i] for i in index])
        loss, metrics = algo.actor_loss(leaf[where], entropy[where], batch.take(index), total)
        losses.append(loss)
        seen.append(metrics)
    value = torch.stack(losses).sum()
    value.backward()
    assert leaf.grad is not None
    of_entropy = torch.zeros_like(leaf) if entropy.grad is None else entropy.grad
    return value.detach(), torch.stack([leaf.grad, of_entropy]), Metrics.merge(seen)
