"""Trackio: a local dashboard (`trackio show`)."""

from __future__ import annotations

from collections.abc import Mapping

from verl.core.errors import MissingDependency
from verl.utils.tracking.base import Start, flat


class TrackioSink:
    """A resumed run goes on under its name; the steps it repeats are logged twice with equal values."""

    def __init__(self, start: Start):
        try:
            import trackio
        except ImportError as e:
            raise MissingDependency("trainer.sinks: trackio is not installed; run: pip install 'verl[trackio]'") from e
        config = {key: v if isinstance(v, (int, float)) else str(v) for key, v in flat(start.config).items()}
        self._run = trackio.init(
            project="verl", name=start.run_name, config=config, resume="allow" if start.resume else "never"
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        """Nothing to do: see the class."""

    def close(self) -> None:
        self._run.finish()
