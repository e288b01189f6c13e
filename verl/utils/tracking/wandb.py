"""Weights & Biases. `WANDB_MODE=offline` writes to the output folder only."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from verl.core.errors import MissingDependency
from verl.utils.tracking.base import Start, read_run_id, write_run_id


class WandbSink:
    """A resumed run goes on under its id. Steps that were logged before are ignored by the service, which holds the
    same numbers: a resumed run repeats them bit for bit."""

    def __init__(self, start: Start):
        try:
            import wandb
        except ImportError as e:
            raise MissingDependency("trainer.sinks: wandb is not installed; run: pip install 'verl[wandb]'") from e
        run_id = read_run_id(start, "wandb") or uuid.uuid4().hex[:12]
        write_run_id(start, "wandb", run_id)
        self._run = wandb.init(
            project="verl",
            name=start.run_name,
            dir=str(start.output_dir),
            config=dict(start.config),
            id=run_id,
            resume="allow",
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        """Nothing to do: see the class."""

    def close(self) -> None:
        self._run.finish()
