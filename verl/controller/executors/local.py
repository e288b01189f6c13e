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
        if operation.dispatch.gives == "per_rank":
            kwargs = {name: value for name, (value,) in kwargs.items()}
        if batch is None:
            return Done(operation.dispatch.merge([fn(**kwargs)]))
        result = fn(batch.select(operation.columns(batch)), **kwargs)
        operation.check(method, result)
        # A batch of one part is as it came: its identity stays.
        return Done(result if isinstance(result, Batch) else operation.dispatch.merge([result]))
