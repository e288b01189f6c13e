"""The embedded executor: one process, one worker, the same worker code and the same checks as anywhere else."""

from __future__ import annotations

from typing import Any

from verl.controller.group import Done
from verl.controller.worker import Operation, Worker
from verl.core.batch import Batch


class LocalGroup:
    """One worker in this process. A method sees only the columns it declared, and must return those it promised."""

    def __init__(self, worker: Worker):
        self.worker = worker

    def call(self, method: str, batch: Batch | None = None, **kwargs: Any) -> Done[Any]:
        fn = getattr(self.worker, method)
        operation = getattr(fn, "operation", None)
        if not isinstance(operation, Operation):
            raise AttributeError(f"{type(self.worker).__name__}.{method} is not marked with @register")
        if batch is None:
            return Done(fn(**kwargs))
        names = operation.reads + tuple(name for name in operation.optional if name in batch)
        result = fn(batch.select(names), **kwargs)
        if operation.writes:
            got = set(result.cols) if isinstance(result, Batch) else type(result)
            assert got == set(operation.writes), f"{method} declares writes={operation.writes}, returned {got}"
        return Done(result)

    def state_dict(self) -> dict[str, Any]:
        return self.worker.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.worker.load_state_dict(state)
