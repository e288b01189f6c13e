"""Rewards of what is done, in a thread, while other responses are sampled."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType

from verl.rewards.composer import Parts
from verl.trainer.reward import RewardScorer
from verl.trainer.source import Group

_PATIENCE = 5.0
"""Seconds that a run which fails, or is interrupted, waits for a call of outside code to return."""


class EarlyRewards:
    """`with EarlyRewards(scorer) as early:` put groups in as they finish, and take the parts of all of them at the end.

    One thread calls the scorer, never twice at a time; a call gets all groups that wait then. What it raises is raised
    by the next `put` or `take`. The thread ends with the block: at once, or, where the block fails, when the call that
    is going on returns (waited for a few seconds; a call that never returns does not keep the process alive).
    """

    def __init__(self, scorer: RewardScorer):
        self._scorer = scorer
        self._waiting: dict[int, Group] = {}
        self._parts: dict[int, Parts] = {}
        self._calls: list[tuple[float, float]] = []
        self._complete = self._ended = False
        self._caught = _Caught()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="early-rewards", daemon=True)
        self.overlapped = 0.0
        """Seconds of calls before `take`."""

    def __enter__(self) -> EarlyRewards:
        if self._scorer.early:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._changed:
            self._waiting.clear()
        self._end()
        if self._scorer.early:
            self._thread.join(_PATIENCE)

    def put(self, groups: Mapping[int, Group]) -> None:
        """groups: by place. Call it now and then with nothing, too: it raises what went wrong."""
        self._caught.raise_it()
        if groups and self._scorer.early:
            with self._changed:
                self._waiting |= groups
                self._changed.notify()

    def take(self) -> Parts:
        """Values of the early parts, of all groups in order of place; waits for them."""
        now = time.perf_counter()
        self._end()
        with self._changed:  # a join that Ctrl-C interrupts would take the thread for ended
            self._changed.wait_for(lambda: self._ended or not self._scorer.early)
        self._caught.raise_it()
        self.overlapped = sum(max(0.0, min(end, now) - start) for start, end in self._calls)
        rows = [self._parts[place] for place in sorted(self._parts)]
        return {name: [v for row in rows for v in row[name]] for name in self._scorer.early if rows}

    def _end(self) -> None:
        with self._changed:
            self._complete = True
            self._changed.notify()

    def _work(self) -> None:
        with self._caught:
            while groups := self._next():
                start = time.perf_counter()
                parts = self._scorer.score_early([t for group in groups.values() for t in group.row])
                self._calls.append((start, time.perf_counter()))
                at = 0
                for place, group in groups.items():
                    stop = at + len(group.row)
                    self._parts[place] = {name: values[at:stop] for name, values in parts.items()}
                    at = stop
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _next(self) -> dict[int, Group]:
        """All that wait, as soon as some do; none after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._complete)
            groups, self._waiting = self._waiting, {}
            return groups


class _Caught:
    """Keeps what a block in a thread raises, for the thread that waits for it to raise."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._error = error
        return True

    def raise_it(self) -> None:
        if self._error is not None:
            raise self._error
