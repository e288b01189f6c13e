"""Scores of finished prompts: batches that do not depend on the clock, columns in the order of what is kept."""

from __future__ import annotations

import random

import pytest
import torch

from verl.controller.group import Done
from verl.core.batch import Batch
from verl.core.prompt import Prompt
from verl.core.trajectory import Trajectory
from verl.trainer.early_scores import PARTS, Ask, EarlyScores
from verl.trainer.source import Group


def group(place: int) -> Group:
    """Two samples of different lengths."""
    return Group(place, tuple(trajectory(place, k) for k in range(2)))


def trajectory(place: int, number: int) -> Trajectory:
    size = 3 + place + number
    ids = tuple(range(100 * place + 10 * number, 100 * place + 10 * number + size))
    return Trajectory(
        group_id=place,
        sample_id=number,
        prompt=Prompt(str(place), ids[:1], "", None, ""),
        token_ids=ids,
        loss_mask=(0, *[1] * (size - 1)),
        logprobs=(0.0, *[-1.0] * (size - 1)),
        finish="stop",
        versions=(0,) * size,
        response_text="",
    )


class Doubles:
    """A model that says twice a token's id; it remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def call(self, method: str, batch: Batch) -> Done[Batch]:
        self.asked.append(sorted(set(batch["group_id"].tolist())))
        return Done(Batch(batch.cu_seqlens, {"values": 2.0 * batch["token_ids"].float()}))


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_finishing_gives_the_same_batches(seed: int) -> None:
    model = Doubles()
    scores = EarlyScores([Ask("values", model, "values")])  # type: ignore[arg-type]
    for places in (range(10), range(10, 13)):  # two rounds, the second of fewer prompts than parts
        scores.begin(places)
        order = random.Random(seed).sample(list(places), len(places))
        for place in order:
            scores.put({})
            scores.put({place: group(place)})
    assert sorted(model.asked) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9], [10], [11], [12]] and PARTS == 4
    kept = [7, 0, 12]
    want = torch.cat([2.0 * torch.tensor(t.token_ids).float() for place in kept for t in group(place).samples])
    assert torch.equal(scores.columns(kept)["values"], want)


def test_without_models_apart_nothing_happens() -> None:
    scores = EarlyScores([])
    scores.begin(range(4))
    scores.put({0: group(0)})
    assert scores.columns([0]) == {}
