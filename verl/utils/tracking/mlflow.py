"""MLflow. Goes to MLFLOW_TRACKING_URI where that is set, else to a database in the output folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice

from verl.core.errors import MissingDependency
from verl.utils.tracking.base import Start, flat, read_run_id, write_run_id

_PARAMS_A_CALL = 100
_LONGEST_PARAM = 500


class MlflowSink:
    """A resumed run goes on under its id; the steps it repeats are logged twice with equal values."""

    def __init__(self, start: Start):
        try:
            import mlflow
        except ImportError as e:
            raise MissingDependency("trainer.sinks: mlflow is not installed; run: pip install 'verl[mlflow]'") from e
        self._mlflow = mlflow
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(f"sqlite:///{start.output_dir.resolve() / 'mlflow.db'}")
        mlflow.set_experiment("verl")
        if known := read_run_id(start, "mlflow"):
            mlflow.start_run(run_id=known)
            return
        run = mlflow.start_run(run_name=start.run_name)
        write_run_id(start, "mlflow", run.info.run_id)
        params = iter((key, str(value)[:_LONGEST_PARAM]) for key, value in flat(start.config).items())
        while some := dict(islice(params, _PARAMS_A_CALL)):
            mlflow.log_params(some)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        """Nothing to do: see the class."""

    def close(self) -> None:
        self._mlflow.end_run()
