"""Who is prefilled next: first come, first served, with everything that starts from the same tokens taken together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from verl.engines.rollout.admission import Admission
from verl.engines.rollout.sequence import Sequence

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """One prefill: `tokens` are computed once for all `members`. `more`: others with these tokens wait for a slot."""

    tokens: Tokens
    members: tuple[Sequence, ...]
    more: bool


@dataclass
class Filling:
    """A unit whose prompt is computed in chunks, in the slot behind the running ones; `at` tokens are there."""

    unit: Unit
    at: int

    def chunk(self, prefill_tokens: int) -> Tokens:
        """The tokens to compute next. Twice as many for each setback: who sends new weights all the time would
        otherwise keep the prompt from ever getting done.
        """
        size = prefill_tokens << max(s.setbacks for s in self.unit.members)
        return self.unit.tokens[self.at : self.at + size]


class Waiting:
    """Sequences without a slot, keyed by the tokens that their prefill would compute.

    Sharing goes by tokens, not by group_id: a group's samples share because their prompts are equal, and nothing is
    shared that is not.
    """

    def __init__(self) -> None:
        self._queues: dict[Tokens, deque[Sequence]] = {}

    def __len__(self) -> int:
        return sum(len(q) for q in self._queues.values())

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, tokens: object) -> bool:
        """Whether a sequence that starts from these tokens waits."""
        return tokens in self._queues

    def add(self, sequences: Iterable[Sequence]) -> None:
        for s in sequences:
            self._queues.setdefault(s.all_tokens, deque()).append(s)

    def add_front(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences that had a slot before those that never had one."""
        later, self._queues = self._queues, {}
        self.add(sequences)
        for tokens, queue in later.items():
            self._queues.setdefault(tokens, deque()).extend(queue)

    def remove(self, ids: set[str]) -> list[Sequence]:
        """Take out the sequences of these request ids."""
        gone = [s for s in self if s.request.id in ids]
        kept = [s for s in self if s.request.id not in ids]
        self._queues = {}
        self.add(kept)
        return gone

    def take(self, slots: Admission, budget: int, cost_of: Callable[[Tokens], int]) -> list[Unit]:
        """Units of sequences that `slots` admits, up to `budget` prefill tokens. The first unit may exceed it, or it
        would never run.

        cost_of: tokens that a prefill must compute; those already in a cache cost nothing.
        """
        units: list[Unit] = []
        for tokens in list(self._queues):
            cost = cost_of(tokens)
            if cost > budget and units:
                break
            queue = self._queues[tokens]
            members = []
            while queue and slots.admit(queue[0]):
                members.append(queue.popleft())
            if members:
                units.append(Unit(tokens, tuple(members), more=bool(queue)))
            if queue:
                break
            budget -= cost
            del self._queues[tokens]
        return units
