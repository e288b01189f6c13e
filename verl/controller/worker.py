"""A worker is an ordinary class whose remote methods say what they read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.controller.dispatch import RANK_ZERO, Dispatch
from verl.core.batch import Batch

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Operation:
    """reads: the columns that travel to the worker; writes: the columns that must come back (none: metrics do)."""

    dispatch: Dispatch
    reads: tuple[str, ...]
    optional: tuple[str, ...]
    writes: tuple[str, ...]

    def columns(self, batch: Batch) -> tuple[str, ...]:
        """Names of what the worker sees of this batch."""
        return self.reads + tuple(name for name in self.optional if name in batch)

    def check(self, method: str, result: Any) -> None:
        """The worker has returned exactly the columns that it promised."""
        if self.writes:
            got = set(result.cols) if isinstance(result, Batch) else type(result)
            assert got == set(self.writes), f"{method} declares writes={self.writes}, returned {got}"


def register(
    dispatch: Dispatch, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Mark a method as callable through a worker group. `optional` columns travel where the batch has them."""
    # Of a batch that several ranks have whole, several would answer.
    assert not writes or dispatch.gives == "parts" or dispatch == RANK_ZERO, f"{dispatch.name} cannot write columns"

    def mark(fn: F) -> F:
        fn.__dict__["operation"] = Operation(dispatch, reads, optional, writes)
        return fn

    return mark


class Worker:
    """Base of all workers. A test constructs one without any executor."""

    @classmethod
    def operations(cls) -> dict[str, Operation]:
        """Methods that can be called through a group."""
        found = {name: getattr(getattr(cls, name), "operation", None) for name in dir(cls)}
        return {name: operation for name, operation in found.items() if isinstance(operation, Operation)}
