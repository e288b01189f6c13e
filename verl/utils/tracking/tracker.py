"""All sinks of a run behind one call."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.core.errors import ConfigError, MissingDependency
from verl.core.registry import suggestion
from verl.utils.tracking.base import Sink, Start

SINKS = {
    "jsonl": "verl.utils.tracking.jsonl:JsonlSink",
    "tensorboard": "verl.utils.tracking.tensorboard:TensorBoardSink",
    "wandb": "verl.utils.tracking.wandb:WandbSink",
    "mlflow": "verl.utils.tracking.mlflow:MlflowSink",
    "trackio": "verl.utils.tracking.trackio:TrackioSink",
}
"""Name in `trainer.sinks` to the class; a sink's module, and with it its library, loads only when it is chosen."""


class Tracker:
    """`log` gives the numbers of a step to every sink. A sink that fails stops the run: no number is lost unseen."""

    def __init__(
        self,
        sinks: Sequence[str],
        output_dir: str | Path,
        run_name: str | None,
        config: Mapping[str, Any],
        resume: bool = False,
    ):
        """sinks: names from SINKS; run_name: None for the folder's name; config: the resolved tree, as plain values;
        resume: go on with the run that output_dir holds (then call `rewind` before the first `log`).

        Raises ConfigError for an unknown name and MissingDependency for a sink whose library is not installed.
        """
        check_sinks(sinks)
        folder = Path(output_dir)
        make_folder(folder)
        start = Start(folder, run_name or folder.resolve().name, config, resume)
        self._sinks: list[Sink] = []
        for name in dict.fromkeys(sinks):
            module, cls = SINKS[name].split(":")
            self._sinks.append(getattr(importlib.import_module(module), cls)(start))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """metrics: names such as `reward` or `time/rollout` to numbers, of training step `step`."""
        for sink in self._sinks:
            sink.log(metrics, step)

    def rewind(self, step: int) -> None:
        """Forget everything after `step` (0: everything), before the run goes on from its checkpoint."""
        for sink in self._sinks:
            sink.rewind(step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def make_folder(folder: Path) -> None:
    """Create the output folder. Raises ConfigError where that or writing in it is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise ConfigError(
            f"trainer.output_dir: cannot write in {folder} ({e.strerror}); choose another folder (--output_dir)"
        ) from e


def check_sinks(sinks: Sequence[str]) -> None:
    """Raises ConfigError for the first name that is no sink."""
    for name in sinks:
        if name not in SINKS:
            hint = suggestion(name, list(SINKS))
            raise ConfigError(f"trainer.sinks: unknown sink {name!r}{hint}; known: {', '.join(SINKS)}")


def check_installed(sinks: Sequence[str]) -> None:
    """MissingDependency for the first sink whose library is not there; each but jsonl has the name of its library."""
    for name in sinks:
        if name != "jsonl" and name not in sys.modules and importlib.util.find_spec(name) is None:
            raise MissingDependency(
                f"trainer.sinks: {name} is not installed; run: pip install {name} (or leave it out of trainer.sinks)"
            )
