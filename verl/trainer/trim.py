"""Memory does not creep up over a run on a CPU: a fragmented heap is given back when it has grown."""

from __future__ import annotations

from verl.trainer.hooks import Hook
from verl.trainer.loop import StepResult, Trainer
from verl.utils.heap import give_back
from verl.utils.monitoring import resident_memory

_EVERY = 5
_GROWTH = 1.01


class TrimHook(Hook):
    """Every fifth step, free pages go back to the system if resident memory is 1 % above what it first was there.

    Not always: the pages are touched again in the next step, which costs a tenth of it.
    """

    def __init__(self) -> None:
        self.settled: float | None = None
        self.steps = 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.steps += 1
        if self.steps % _EVERY:
            return
        now = resident_memory()
        if self.settled is None:
            self.settled = now
        elif now > _GROWTH * self.settled:
            give_back()
