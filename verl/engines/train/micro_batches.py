"""How a mini-batch is cut into micro-batches: by a token budget, with samples of one prompt kept together."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from verl.config.algorithm import UpdateConfig
from verl.core.batch import Batch, cumulative
from verl.data.packing import plan_micro_batches


def tokens_at_once(update: UpdateConfig, device: str) -> int:
    """Most tokens of a micro-batch on a device: update.micro_batch_tokens, or what suits the device."""
    return update.micro_batch_tokens or (2048 if device == "cpu" else 8192)


def split(batch: Batch, max_tokens: int, share_prompt: bool) -> list[list[int]]:
    """Sequence numbers of each micro-batch; every sequence of `batch` is in exactly one.

    With share_prompt a prompt's tokens count once in its micro-batch; what different prompts share is not taken off.
    """
    units = _units(batch, max_tokens, share_prompt)
    plan = plan_micro_batches([cost for _, cost in units], max_tokens)
    return [[i for u in part for i in units[u][0]] for part in plan]


def idle() -> Batch:
    """A micro-batch that asks the model nothing: one token, which nobody drew."""
    cols = {"token_ids": torch.zeros(1, dtype=torch.int64), "loss_mask": torch.zeros(1, dtype=torch.bool)}
    return Batch(cumulative(torch.ones(1, dtype=torch.int64)), cols)


def _units(batch: Batch, max_tokens: int, share_prompt: bool) -> list[tuple[list[int], int]]:
    """Indivisible sets of sequences with their cost in tokens: single sequences, or runs of one prompt that fit."""
    lengths = batch.lengths.tolist()
    if not share_prompt:
        return [([i], n) for i, n in enumerate(lengths)]
    open_units: dict[Hashable, tuple[list[int], int]] = {}
    done: list[tuple[list[int], int]] = []
    ids = batch.per_seq(batch["token_ids"].cpu())
    for i, head in enumerate(_prompt_lengths(batch)):
        key: Hashable = ids[i][:head].numpy().tobytes() if head else i
        unit = open_units.get(key)
        extra = lengths[i] - head
        if unit is not None and unit[1] + extra <= max_tokens:
            open_units[key] = ([*unit[0], i], unit[1] + extra)
            continue
        if unit is not None:
            done.append(unit)
        open_units[key] = ([i], lengths[i])
    return done + list(open_units.values())


def _prompt_lengths(batch: Batch) -> list[int]:
    """[N] tokens before the first sampled one; 0 where none is sampled, so that such a row is counted whole."""
    return [int(m.to(torch.int8).argmax()) for m in batch.per_seq(batch["loss_mask"])]
