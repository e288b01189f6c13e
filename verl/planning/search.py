"""The search over what the configuration can express: placement, sizes of pools, and a layout for each role.

HybridFlow (arXiv:2409.19256), algorithm 1: for each way to colocate roles and each division of the GPUs among the sets,
the best layout of each role (algorithm 2), at least as many GPUs as its memory needs. Exhaustive: only what is worse in
every respect, or cannot beat what was found, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import nsmallest
from itertools import product

from verl.parallel.layout import Layout
from verl.planning import cost
from verl.planning.fronts import front, shortest, useful
from verl.planning.pool import Pool, Seat, resting, reward_seat, seat, seated
from verl.planning.proposal import Plan, join
from verl.planning.shape import RoleName
from verl.planning.space import Problem, layouts, placements, sizes, tensor_sizes

LARGEST = 1024
"""GPUs up to which the smallest number that fits is looked for."""


@dataclass(frozen=True)
class Miss:
    """What did not fit. needs: bytes of a rank."""

    what: str
    needs: float


class Search:
    """Of one problem; remembers what pools can be."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.pools = lru_cache(maxsize=None)(self._pools)
        self.seats = lru_cache(maxsize=None)(self._seats)

    def best(self, top: int = 1) -> list[Plan]:
        """The shortest steps, first the shortest; of plans that differ in ref and critic only, the best one."""
        found: list[Plan] = []
        for placement, sets in placements(self.problem).items():
            for _, divided in sorted(self._divisions(sets)):
                found = self._better(
                    found, placement, [self.pools(s, n) for s, n in zip(sets, divided, strict=True)], top
                )
        return found

    def _divisions(self, sets: Sequence[tuple[RoleName, ...]]) -> list[tuple[float, tuple[int, ...]]]:
        """(seconds that no plan of it can beat, GPUs of each set) for all divisions that fit."""
        out = []
        for divided in product(sizes(self.problem.hardware), repeat=len(sets)):
            if sum(divided) <= self.problem.hardware.gpus:
                options = [self.pools(s, n) for s, n in zip(sets, divided, strict=True)]
                if all(options):
                    out.append((_bound(options), divided))
        return out

    def _better(self, found: list[Plan], placement: str, options: list[list[Pool]], top: int) -> list[Plan]:
        """`found` with the plans of one division, no more than `top`."""
        if len(found) == top and _bound(options) >= found[-1].seconds:
            return found
        best: dict[object, Plan] = {}
        worst = found[-1].seconds if len(found) == top else float("inf")
        for pools in product(*options):
            seconds = sum(p.first for p in pools) + max(p.score for p in pools) + max(p.train for p in pools)
            if seconds >= worst:
                continue
            plan = join(placement, pools)
            key = (*(p.nproc for p in pools), plan.seat("actor").layout, plan.generation.tp)
            if key not in best or plan.seconds < best[key].seconds:
                best[key] = plan
        return nsmallest(top, [*found, *best.values()], key=lambda plan: (plan.seconds, plan.gpus))

    def _seats(self, name: RoleName, nproc: int) -> list[Seat]:
        role = self.problem.role(name)
        return [seat(role, layout, self.problem) for layout in layouts(role, nproc, self.problem.hardware)]

    def _pools(self, names: tuple[RoleName, ...], nproc: int) -> list[Pool]:
        """All that a set of roles on so many GPUs can be and fits, without those that another beats in all respects
        (with the actor's layout the same).
        """
        alone = len(names) == len(self.problem.roles)
        rest = [name for name in names if name != "actor"]
        beside = front(list(product(*(useful(self.seats(name, nproc)) for name in rest))), alone)
        if "actor" not in names:
            return shortest([seated(seats, None, self.problem) for seats in beside], alone)
        out = []
        for actor in self.seats("actor", nproc):
            for tp in tensor_sizes(actor.role, nproc, self.problem.hardware):
                made = [seated((actor, *seats), tp, self.problem) for seats in beside]
                out += shortest(made, alone)
        return out

    def smallest(self) -> int | None:
        """The smallest number of GPUs on which anything fits; None: none up to LARGEST."""
        wide = Search(_with_gpus(self.problem, LARGEST))
        least: dict[tuple[RoleName, ...], int | None] = {}
        for sets in placements(self.problem).values():
            for s in sets:
                if s not in least:
                    least[s] = next((n for n in sizes(wide.problem.hardware) if wide.pools(s, n)), None)
        totals = [[least[s] for s in sets] for sets in placements(self.problem).values()]
        return min((sum(n for n in t if n is not None) for t in totals if None not in t), default=None)

    def misses(self) -> list[Miss]:
        """The least memory that each set of roles would need on all GPUs there are, where that is too much."""
        out: list[Miss] = []
        seen: set[tuple[RoleName, ...]] = set()
        for sets in placements(self.problem).values():
            for names in sets:
                if names in seen or self.pools(names, sizes(self.problem.hardware)[-1]):
                    continue
                seen.add(names)
                nproc = sizes(self.problem.hardware)[-1]
                out.append(Miss(f"{' + '.join(names)} on {nproc} GPUs", self.least(names, nproc)))
        return out

    def plain(self, name: RoleName, nproc: int) -> Seat:
        """The role whole on every GPU."""
        return seat(self.problem.role(name), Layout(dp=nproc), self.problem)

    def least(self, names: tuple[RoleName, ...], nproc: int) -> float:
        """Bytes that the fullest rank needs at least with one sequence in the cache, over all layouts."""
        return min(self.needs(seats) for seats in product(*(useful(self.seats(n, nproc)) for n in names)))

    def needs(self, seats: Sequence[Seat]) -> float:
        """Bytes of the fullest rank of these with the smallest cache that works."""
        actor = next((s for s in seats if s.role.name == "actor"), None)
        held = resting(seats, reward_seat(actor, self.problem))
        if actor is None:
            return held
        work, nproc = self.problem.work, actor.layout.world
        return held + min(
            cost.copied(actor.role, actor.layout, tp) + cost.slot(actor.role, work, tp) + work.prefixes
            for tp in tensor_sizes(actor.role, nproc, self.problem.hardware)
        )


def _with_gpus(problem: Problem, gpus: int) -> Problem:
    return replace(problem, hardware=replace(problem.hardware, gpus=gpus))


def _bound(options: Sequence[Sequence[Pool]]) -> float:
    """Seconds that no choice of these is under."""
    first = sum(min(p.first for p in pools) for pools in options)
    score, train = (max(min(getattr(p, of) for p in pools) for pools in options) for of in ("score", "train"))
    return float(first + score + train)
