"""What there is to choose from: placements, sizes of pools, layouts of a role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.parallel.layout import Layout
from verl.planning.hardware import Hardware
from verl.planning.shape import Role, RoleName
from verl.planning.workload import Workload

PLACEMENTS: dict[str, tuple[tuple[RoleName, ...], ...]] = {
    "colocated": (("actor", "ref", "critic"),),
    "split": (("actor", "ref"), ("critic",)),
    "standalone": (("actor",), ("ref",), ("critic",)),
}
"""parallel.placement: which roles share processes. The reward model is with the actor (`pool.py:reward_seat`)."""


@dataclass(frozen=True)
class Problem:
    """roles: the actor first; reward: the reward model, or None."""

    hardware: Hardware
    work: Workload
    roles: tuple[Role, ...]
    reward: Role | None = None

    def role(self, name: RoleName) -> Role:
        return next(role for role in self.roles if role.name == name)


def placements(problem: Problem) -> dict[str, tuple[tuple[RoleName, ...], ...]]:
    """Those that differ for these roles, each as the sets of roles that share processes."""
    there = {role.name for role in problem.roles}
    found: dict[str, tuple[tuple[RoleName, ...], ...]] = {}
    for name, sets in PLACEMENTS.items():
        left = tuple(kept for s in sets if (kept := tuple(role for role in s if role in there)))
        if left not in found.values():
            found[name] = left
    return found


def sizes(hw: Hardware) -> list[int]:
    """Sizes that a pool may have: a part of a node, or whole nodes."""
    whole = range(hw.gpus_per_node, hw.gpus + 1, hw.gpus_per_node)
    return sorted({*range(1, min(hw.gpus, hw.gpus_per_node) + 1), *whole})


def layouts(role: Role, nproc: int, hw: Hardware) -> Iterator[Layout]:
    """All of `nproc` ranks. tp stays within a node and divides the query heads; pp is at most the number of layers."""
    for tp in tensor_sizes(role, nproc, hw):
        for pp in divisors(nproc // tp):
            if pp <= role.shape.num_layers:
                dp = nproc // tp // pp
                yield from (Layout(dp, pp, tp, fsdp) for fsdp in divisors(dp))


def tensor_sizes(role: Role, nproc: int, hw: Hardware) -> list[int]:
    heads = role.shape.num_heads
    return [tp for tp in divisors(nproc) if tp <= hw.gpus_per_node and heads % tp == 0]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
