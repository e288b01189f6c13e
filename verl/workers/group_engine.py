"""A rollout engine whose work is done by the ranks of a worker group."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from verl.controller.group import Future, WorkerGroup
from verl.controller.partition import partition
from verl.core.errors import RolloutError
from verl.core.generation import Completion, GenRequest
from verl.core.protocols import Place
from verl.parallel.layout import Coord

if TYPE_CHECKING:
    from torch import Tensor

_SLICE = 0.1
"""Seconds that ranks generate before they tell what is done."""
_AHEAD = 2
"""Slices asked for at one time, so that no rank waits for the controller."""


class GroupEngine:
    """RolloutEngine over a group of ActorRolloutWorkers. places: of every rank among the replicas that generate.

    A request's seed decides its tokens, so they do not depend on the number of ranks (in fp32). Requests of one group
    go to one replica, which prefills their prompt once.
    """

    def __init__(self, group: WorkerGroup, places: Sequence[Coord]):
        self.group, self.places, self.version = group, places, 0
        self._pending: set[str] = set()
        self._asked: deque[Future[list[list[Completion]]]] = deque()
        self._arrived: list[Completion] = []

    def submit(self, requests: Sequence[GenRequest]) -> None:
        """Give each replica about the same number of tokens to make; all of its ranks get its requests."""
        costs = [len(r.token_ids) + r.params.max_tokens for r in requests]
        count = 1 + max(place.dp for place in self.places)
        parts = partition(costs, count, [r.group_id for r in requests])
        mine = [[requests[i] for i in parts[place.dp]] for place in self.places]
        self.group.call("submit", requests=mine).result()
        self._pending |= {r.id for r in requests}

    def poll(self) -> list[Completion]:
        """What finished in the last slice of any rank."""
        if self._pending and not self._arrived:
            while len(self._asked) < _AHEAD:
                self._asked.append(self.group.call("advance", seconds=_SLICE))
            self._take()
        done, self._arrived = self._arrived, []
        self._pending -= {c.request_id for c in done}
        if not self._pending:
            self._drain()  # the ranks have nothing to do: these return at once
        return done

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Stop these requests; those that were done by then come back as they are."""
        ids = set(request_ids) & self._pending
        self._drain()
        stopped = [c for part in self.group.call("abort", request_ids=sorted(ids)).result() for c in part]
        stopped += [c for c in self._arrived if c.request_id in ids]
        self._arrived = [c for c in self._arrived if c.request_id not in ids]
        self._pending -= ids
        return stopped

    def _take(self) -> None:
        self._arrived += [c for part in self._asked.popleft().result() for c in part]

    def _drain(self) -> None:
        while self._asked:
            self._take()

    def wanted(self) -> Sequence[str]:
        """No names: each rank's engine reads the weights of that rank's actor."""
        return ()

    def receive(self, name: str, tensor: Tensor) -> None:
        """Refuse: a weight sent here would have nowhere to go."""
        raise RolloutError(f"weight {name!r}: the ranks read their own actor's weights; send nothing")

    def commit(self, version: int) -> None:
        self.group.call("publish", version=version).result()
        self.version = version

    def counts(self) -> Mapping[str, int]:
        """Added up over the ranks."""
        total = Counter[str]()
        for counts in self.group.call("counts").result():
            total.update(counts)
        return total

    def place(self, where: Place) -> None:
        self.group.call("place", where=where).result()
