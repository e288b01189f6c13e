"""Processes: how many, where, and how long they may be silent."""

from typing import Literal

from pydantic import Field

from verl.config.base import Section


class ParallelConfig(Section):
    """Where models run. With several processes each holds every model and works on a part of the batch."""

    executor: Literal["embedded", "ray"] = "embedded"
    """`embedded`: in the process of the loop. `ray`: in processes of their own, on Ray (which nproc above 1 and an
    address choose by themselves).
    """
    nproc: int = Field(1, ge=1)
    """Processes; each samples, scores and learns from its part of the batch, and their gradients are added. Changes no
    number beyond rounding. On GPUs each takes one.
    """
    address: str | None = Field(None, min_length=1)
    """Ray cluster to run on (`auto`, HOST:PORT, ray://HOST:PORT), whose machines have this package and the models under
    the same paths; null: one is started on this machine for the run.
    """
    deadline: float = Field(1800.0, gt=0)
    """Seconds that one call of a worker may take, loading a model included (ray). After that, or when a process dies,
    the run ends with an error that names the worker.
    """
    threads: int | None = Field(None, ge=1)
    """Threads of each process (ray); null: those that torch has here, divided among the processes."""
