"""TensorBoard event files, in OUTPUT_DIR/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from verl.core.errors import MissingDependency
from verl.utils.tracking.base import Start


class TensorBoardSink:
    """Opens its file at the first log, because a resumed run must tell the reader which steps to drop."""

    def __init__(self, start: Start):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise MissingDependency(
                "trainer.sinks: tensorboard is not installed; run: pip install tensorboard (or trainer.sinks=[jsonl])"
            ) from e
        self._start = start
        self._purge_step: int | None = None
        self._open = SummaryWriter
        self._writer: SummaryWriter | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            folder = str(self._start.output_dir / "tensorboard")
            self._writer = self._open(folder, purge_step=self._purge_step, flush_secs=10)
            text = yaml.safe_dump(dict(self._start.config), sort_keys=False)
            self._writer.add_text("config", "\n".join("    " + line for line in text.splitlines()), 0)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        self._purge_step = step + 1 if step > 0 else 0

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
