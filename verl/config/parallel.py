"""Processes: how many, where, how models are cut over them, and how long they may be silent."""

from typing import Literal

from pydantic import Field

from verl.config.base import Section


class DataLayout(Section):
    """How a role of data ranks only differs from the actor; null: as the actor."""

    nproc: int | None = Field(None, ge=1)
    """Processes of its own pool; only where `parallel.placement` gives it one."""
    fsdp: int | None = Field(None, ge=-1)
    """As parallel.fsdp."""


class RoleLayout(DataLayout):
    """How a role differs from the actor; null: as the actor."""

    tp: int | None = Field(None, ge=1)
    """As parallel.tp."""
    pp: int | None = Field(None, ge=1)
    """As parallel.pp."""


class ParallelConfig(Section):
    """Where models run, and how they are cut. Changes no number beyond rounding."""

    executor: Literal["embedded", "ray"] = "embedded"
    """`embedded`: in the process of the loop. `ray`: in processes of their own, on Ray (which nproc above 1, another
    placement and an address choose by themselves).
    """
    nproc: int = Field(1, ge=1)
    """Processes of the actor, and of all roles where they are colocated: the product of data, pipeline and tensor
    parallel sizes. Data parallel replicas each sample, score and learn from a part of the batch, and their gradients
    are added. On GPUs each process takes one.
    """
    placement: Literal["colocated", "split", "standalone"] = "colocated"
    """`colocated`: all roles share the processes and take turns. `split`: the critic has processes of its own and works
    while actor and reference do. `standalone`: actor, reference and critic have processes of their own, and the
    reward model where `reward.nproc` says how many.
    """
    fsdp: int | None = Field(None, ge=-1)
    """Data parallel neighbours that share one copy of weights, gradients and optimizer (FSDP2); 1: each holds its own;
    -1: all of them share one; null: 1 where that fits into memory, by the estimate of --dry-run, else -1.
    """
    tp: int = Field(1, ge=1)
    """Tensor parallel processes: each matrix, and the vocabulary, is cut over them."""
    pp: int = Field(1, ge=1)
    """Pipeline stages: each process holds some of the layers."""
    generation_tp: int | None = Field(None, ge=1)
    """Tensor parallel processes of the model that generates; null: as parallel.tp. Weights are resharded after each
    update where the two layouts differ.
    """
    ref: RoleLayout = RoleLayout()
    """The reference."""
    critic: RoleLayout = RoleLayout()
    """The critic."""
    reward: DataLayout = DataLayout()
    """The reward model: conversations are scored in parallel by the actor's processes, or by `nproc` of its own
    (placement standalone), each with all of it or with a part (`fsdp`). It is not cut by tensors or stages.
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
