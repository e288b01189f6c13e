"""A worker whose model is trained: its state goes to a folder and comes back, whatever number of ranks hold it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from verl.checkpoint.sharded import load, save
from verl.controller.dispatch import ONE_TO_ALL
from verl.controller.worker import Worker, register
from verl.core.errors import CheckpointError
from verl.engines.train.engine import EmbeddedTrainEngine

_COUNTERS = "counters.json"


class TrainedWorker(Worker):
    """engine: trains the model, on the ranks that hold it. offloads: its state rests on the host between updates."""

    engine: EmbeddedTrainEngine
    offloads: bool = False

    def rest(self) -> None:
        """Between updates: training state out of the way, where the configuration wants that."""
        if self.offloads:
            self.engine.place("released")

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Training state is here, and rests afterwards."""
        self.engine.place("device")
        yield
        self.rest()

    @register(ONE_TO_ALL)
    def save(self, folder: str) -> list[str]:
        """Write what the next step depends on into a folder, which all ranks see; the names of this rank's files."""
        path = Path(folder)
        written = save(path, self.engine.owned_pieces())
        if self.engine.mesh.first:
            with (path / _COUNTERS).open("w", encoding="utf-8") as f:
                json.dump(self.engine.counters(), f)
                f.flush()
                os.fsync(f.fileno())
            written.append(_COUNTERS)
        return written

    @register(ONE_TO_ALL)
    def restore(self, folder: str) -> None:
        """Go on from what `save` wrote, from any number of ranks. CheckpointError where it is of another model."""
        path = Path(folder)
        try:
            counters = json.loads((path / _COUNTERS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path / _COUNTERS}: cannot be read ({e})") from e
        self.engine.load(counters, partial(load, path, complete=True))
