"""Where things beside the training itself take part: logging, evaluation, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.trainer.loop import StepResult, Trainer


class Hook:
    """Does nothing at every point; a hook overrides what it cares about."""

    def before_run(self, trainer: Trainer) -> None:
        """After the weights were published and any checkpoint restored, before the first step."""

    def on_phase(self, name: str) -> None:
        """A phase of a step begins."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """May add to result.metrics."""

    def after_run(self, trainer: Trainer) -> None:
        """After the last step."""
