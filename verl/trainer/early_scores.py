"""Scores of prompts that are done, by models on processes of their own, while other prompts are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.controller.group import Future, WorkerGroup
from verl.core.batch import Batch
from verl.trainer.source import Group

PARTS = 4
"""Batches that the prompts of a round are scored in."""


@dataclass(frozen=True)
class Ask:
    """A column, and who makes it how."""

    column: str
    group: WorkerGroup
    method: str


class EarlyScores:
    """asks: of models that have processes of their own; none: nothing happens here.

    A round's prompts form PARTS batches by their places, not by when they were done, and each is sent when all of its
    prompts are: so no number depends on the clock.
    """

    def __init__(self, asks: Sequence[Ask]):
        self.asks = asks
        self._open: list[list[int]] = []
        self._groups: dict[int, Group] = {}
        self._sent: list[tuple[list[int], dict[str, Future[Batch]]]] = []

    def begin(self, places: range) -> None:
        """A round is about to be sampled. places: of its prompts."""
        if self.asks:
            self._open += [part.tolist() for part in np.array_split(np.array(places), PARTS) if len(part)]

    def put(self, groups: Mapping[int, Group]) -> None:
        """Prompts that are done, by place."""
        if not self.asks or not groups:
            return
        self._groups |= groups
        for part in [part for part in self._open if all(place in self._groups for place in part)]:
            self._open.remove(part)
            batch = Batch.of([t for place in part for t in self._groups[place].samples])
            self._sent.append((part, {a.column: a.group.call(a.method, batch) for a in self.asks}))

    def columns(self, kept: Sequence[int]) -> dict[str, Tensor]:
        """Their columns for the groups at these places, in this order."""
        assert not self._open, "a round was not sampled to its end"
        return {a.column: torch.cat(self._rows(a.column, kept)) for a in self.asks if kept}

    def _rows(self, column: str, kept: Sequence[int]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for part, answers in self._sent:
            batch = answers[column].result()
            rows, at = batch.per_seq(batch[column]), 0
            for place in part:
                n = len(self._groups[place].samples)
                found[place] = torch.cat(list(rows[at : at + n]))
                at += n
        return [found[place] for place in kept]
