"""Layout arithmetic: which coordinates a rank has. Pure; knows no process."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.parallel import DataLayout, ParallelConfig, RoleLayout
from verl.core.errors import ConfigError


@dataclass(frozen=True)
class Coord:
    """Place of a rank along the data, pipeline and tensor axes."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the data, pipeline and tensor axes; ranks run through tensor first, data last.

    fsdp: how many neighbours along the data axis share one copy of the weights (FSDP cuts dimension 0 among them, after
    tensor parallelism); 1: each holds its own.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    fsdp: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp", "fsdp"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"{axis}: {getattr(self, axis)} ranks; an axis has 1 or more")
        if self.dp % self.fsdp:
            raise ConfigError(f"fsdp: {self.fsdp} does not divide dp {self.dp}; FSDP cuts along the data axis")

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp

    def generates_in_place(self, tp: int) -> bool:
        """Whether ranks trained so hold just what they generate with in replicas of `tp` ranks."""
        return self.tp == tp and self.pp == self.fsdp == 1

    def coord(self, rank: int) -> Coord:
        return Coord(rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp)


def layout_of(p: ParallelConfig, role: str) -> Layout:
    """Of `actor`, `ref`, `critic` or `reward`; parallel.fsdp=null counts as 1. ConfigError: the sizes do not divide
    each other, with the path to change.
    """
    own: DataLayout = {"ref": p.ref, "critic": p.critic, "reward": p.reward}.get(role, RoleLayout())
    section = "parallel" if role == "actor" else f"parallel.{role}"
    nproc, fsdp = _either(own.nproc, p.nproc), _either(own.fsdp, 1 if p.fsdp is None else p.fsdp)
    tp, pp = (_either(own.tp, p.tp), _either(own.pp, p.pp)) if isinstance(own, RoleLayout) else (1, 1)
    if nproc % (tp * pp):
        raise ConfigError(
            f"{section}: tp {tp} x pp {pp} does not divide {nproc} processes; set {section}.tp and {section}.pp "
            f"so that their product does, or {section}.nproc to a multiple of {tp * pp}"
        )
    dp = nproc // (tp * pp)
    if fsdp == 0 or dp % (dp if fsdp == -1 else fsdp):
        raise ConfigError(
            f"{section}.fsdp: {fsdp} does not divide the {dp} data parallel ranks ({nproc} processes / tp {tp} / pp "
            f"{pp}); set it to -1 (all of them), or to a divisor"
        )
    return Layout(dp, pp, tp, dp if fsdp == -1 else fsdp)


def _either(own: int | None, actors: int) -> int:
    return actors if own is None else own


def generation_tp(p: ParallelConfig) -> int:
    """Tensor ranks that generate together."""
    return p.generation_tp or p.tp


def pools_of(p: ParallelConfig, roles: list[str]) -> list[list[str]]:
    """Which of `roles` share processes. ConfigError: processes of its own for a role that has no pool of its own, or
    roles of one pool whose layouts are of different sizes.
    """
    alone = {"colocated": (), "split": ("critic",), "standalone": ("ref", "critic")}[p.placement]
    if p.placement == "standalone" and p.reward.nproc is not None:
        alone = (*alone, "reward")
    for role, section in (("ref", p.ref), ("critic", p.critic), ("reward", p.reward)):
        if section.nproc not in (None, p.nproc) and role not in alone:
            raise ConfigError(
                f"parallel.{role}.nproc: {section.nproc}, but with parallel.placement={p.placement} it shares the "
                f"{p.nproc} processes of the actor; leave it out, or set parallel.placement=standalone"
            )
    shared = [role for role in roles if role not in alone]
    return [shared, *([role] for role in roles if role in alone)]
