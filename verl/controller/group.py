"""A worker group: the controller's handle on the workers of one role."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from verl.core.batch import Batch

T = TypeVar("T", covariant=True)


class Future(Protocol[T]):
    """The result of a call that may still be running."""

    def result(self) -> T: ...


class Done(Generic[T]):
    """A result that is already there."""

    def __init__(self, value: T):
        self._value = value

    def result(self) -> T:
        return self._value


def gather(*futures: Future[Any]) -> list[Any]:
    """Wait for all, in order."""
    return [f.result() for f in futures]


class WorkerGroup(Protocol):
    """Methods of the worker, called by name; each returns a Future of the merged answer."""

    def call(self, method: str, batch: Batch | None = None, **kwargs: Any) -> Future[Any]: ...
