"""The reward model on its processes, and what the loop asks: conversations in, scores out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from verl.controller.dispatch import ALL_TO_ALL
from verl.controller.group import WorkerGroup
from verl.controller.partition import order, partition
from verl.controller.worker import Worker, register
from verl.core.prompt import content_text
from verl.models.reward_model import Conversation, RewardModel
from verl.parallel.fsdp import release, shard
from verl.parallel.mesh import SINGLE, Mesh


class Scores(Protocol):
    """What gives conversations a score each. truncated: how many lost their beginning so far."""

    truncated: int

    def score(self, conversations: Sequence[Conversation]) -> list[float]: ...


class RewardModelWorker(Worker):
    """One rank's reward model: whole, or with `mesh.layout.fsdp` above 1 a part."""

    def __init__(self, model: RewardModel, mesh: Mesh = SINGLE):
        self.model, self.sharded = model, mesh.sharded
        if self.sharded:
            shard(model.scorer, mesh)
            model.agree = mesh.most

    @register(ALL_TO_ALL)
    def score(self, conversations: Sequence[Conversation]) -> tuple[list[float], int]:
        """Scores of this rank's conversations, maybe none, and how many of them lost their beginning."""
        before = self.model.truncated
        scores = self.model.score(conversations)
        if self.sharded:
            release(self.model.scorer)
        return scores, self.model.truncated - before


class RewardModelGroup:
    """All ranks of the reward model as one. Each of `ranks` gets about as much text."""

    def __init__(self, group: WorkerGroup, ranks: int = 1):
        self.group, self.ranks, self.truncated = group, ranks, 0

    def score(self, conversations: Sequence[Conversation]) -> list[float]:
        """One score a conversation, in order."""
        parts = partition([1 + _size(c) for c in conversations], self.ranks)
        mine = [[conversations[i] for i in part] for part in parts]
        answers = self.group.call("score", conversations=mine).result()
        self.truncated += sum(cut for _, cut in answers)
        joined = [score for scores, _ in answers for score in scores]
        return [joined[place] for place in order(parts)]


def _size(conversation: Conversation) -> int:
    messages, response = conversation
    return len(response) + sum(len(content_text(m)) for m in messages)
