"""A worker is an ordinary class whose remote methods say what they read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.controller.dispatch import Dispatch

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Operation:
    """reads: the columns that travel to the worker; writes: the columns that must come back (none: metrics do)."""

    dispatch: Dispatch
    reads: tuple[str, ...]
    optional: tuple[str, ...]
    writes: tuple[str, ...]


def register(
    dispatch: Dispatch, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Mark a method as callable through a worker group. `optional` columns travel where the batch has them."""

    def mark(fn: F) -> F:
        fn.__dict__["operation"] = Operation(dispatch, reads, optional, writes)
        return fn

    return mark


class Worker:
    """Base of all workers. A test constructs one without any executor."""

    def state_dict(self) -> dict[str, Any]:
        """What the worker must get back to go on as if never stopped; empty for frozen models."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"{type(self).__name__} has no state, got {sorted(state)}"
