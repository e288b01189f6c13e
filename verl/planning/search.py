"""The search over what the configuration can express: placement, sizes of pools, and a layout for each role.

HybridFlow (arXiv:2409.19256), algorithm 1: for each way to colocate roles and each division of the GPUs among the sets,
the best layout of each role (algorithm 2), at least as many GPUs as its memory needs. Exhaustive: only what is worse in
every respect, or cannot beat what was found, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import nsmallest
from itertools import product
from typing import TypeVar

from verl.parallel.layout import Layout
from verl.planning import cost
from verl.planning.cost import Generation, Parts
from verl.planning.hardware import Hardware
from verl.planning.shape import Role, RoleName
from verl.planning.workload import Workload

T = TypeVar("T")
PLACEMENTS: dict[str, tuple[tuple[RoleName, ...], ...]] = {
    "colocated": (("actor", "ref", "critic"),),
    "split": (("actor", "ref"), ("critic",)),
    "standalone": (("actor",), ("ref",), ("critic",)),
}
"""parallel.placement: which roles share processes. The reward model is in the controller's, on the first GPU."""
LARGEST = 1024
"""GPUs up to which the smallest number that fits is looked for."""


@dataclass(frozen=True)
class Problem:
    """roles: the actor first; reward: the reward model, or None."""

    hardware: Hardware
    work: Workload
    roles: tuple[Role, ...]
    reward: Role | None = None

    def role(self, name: RoleName) -> Role:
        return next(role for role in self.roles if role.name == name)


@dataclass(frozen=True)
class Seat:
    """A role in a layout. kept, passing: bytes of a rank; score, train: seconds by part."""

    role: Role
    layout: Layout
    kept: float
    passing: float
    score: Parts
    train: Parts

    @property
    def score_s(self) -> float:
        return sum(self.score.values())

    @property
    def train_s(self) -> float:
        return sum(self.train.values())


@dataclass(frozen=True)
class Pool:
    """Roles that share `nproc` processes. first: seconds of generation and resharding; score, train: of all its roles
    one after the other; memory: bytes of the fullest rank.
    """

    nproc: int
    seats: tuple[Seat, ...]
    generation: Generation | None
    memory: float
    first: float
    score: float
    train: float


@dataclass(frozen=True)
class Plan:
    """One placement with sizes and layouts. Seconds of a step: stages follow each other, pools work side by side."""

    placement: str
    pools: tuple[Pool, ...]
    generate: float
    score: float
    train: float
    reshard: float
    reward: float

    @property
    def seconds(self) -> float:
        return self.generate + self.score + self.train + self.reshard

    @property
    def gpus(self) -> int:
        return sum(pool.nproc for pool in self.pools)

    @property
    def generation(self) -> Generation:
        found = next(pool.generation for pool in self.pools if pool.generation is not None)
        assert found is not None
        return found

    def pool_of(self, name: RoleName) -> Pool:
        return next(pool for pool in self.pools if any(seat.role.name == name for seat in pool.seats))

    def seat(self, name: RoleName) -> Seat:
        return next(seat for pool in self.pools for seat in pool.seats if seat.role.name == name)


@dataclass(frozen=True)
class Miss:
    """What did not fit. needs: bytes of a rank."""

    what: str
    needs: float


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


def seat(role: Role, layout: Layout, problem: Problem) -> Seat:
    """The role in this layout, alone."""
    work, hw = problem.work, problem.hardware
    return Seat(
        role,
        layout,
        cost.kept(role, work, layout),
        cost.passing(role, work, layout),
        cost.scoring(role, work, layout, hw) if role.scores else {},
        cost.training(role, work, layout, hw) if role.trains else {},
    )


def reward_seat(problem: Problem) -> Seat | None:
    """The reward model: whole, on one GPU."""
    return None if problem.reward is None else seat(problem.reward, Layout(), problem)


def seated(seats: Sequence[Seat], tp: int | None, reward: Seat | None, problem: Problem) -> Pool | None:
    """These roles in one pool; tp: of the layout that generates, None where the actor is not here. None: does not fit.

    The fullest rank holds what all roles keep, the cache, and what passes while the most demanding of them works.
    """
    others = [] if reward is None or tp is None else [reward]
    held = sum(s.kept for s in [*seats, *others]) + max(s.passing for s in [*seats, *others])
    made, nproc = None, seats[0].layout.world
    if tp is not None:
        actor = next(s for s in seats if s.role.name == "actor")
        held += cost.copied(actor.role, actor.layout, tp)
        room = problem.hardware.usable - held
        made = cost.generation(actor.role, problem.work, actor.layout, tp, room, problem.hardware)
        if made is None:
            return None
        held += made.cache
    if held > problem.hardware.usable:
        return None
    first = 0.0 if made is None else sum(made.parts.values()) + made.reshard
    return Pool(nproc, tuple(seats), made, held, first, sum(s.score_s for s in seats), sum(s.train_s for s in seats))


def join(placement: str, pools: Sequence[Pool], reward: Seat | None) -> Plan:
    """Pools side by side: a stage takes as long as the pool that needs longest for it."""
    made = next(pool.generation for pool in pools if pool.generation is not None)
    alone = 0.0 if reward is None else reward.score_s
    return Plan(
        placement,
        tuple(pools),
        sum(made.parts.values()),
        max(pool.score for pool in pools) + alone,
        max(pool.train for pool in pools),
        made.reshard,
        alone,
    )


class Search:
    """Of one problem; remembers what pools can be."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.reward = reward_seat(problem)
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
        alone = 0.0 if self.reward is None else self.reward.score_s
        if len(found) == top and _bound(options) + alone >= found[-1].seconds:
            return found
        best: dict[object, Plan] = {}
        worst = found[-1].seconds if len(found) == top else float("inf")
        for pools in product(*options):
            seconds = sum(p.first for p in pools) + max(p.score for p in pools) + max(p.train for p in pools) + alone
            if seconds >= worst:
                continue
            plan = join(placement, pools, self.reward)
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
        beside = _front(list(product(*(_useful(self.seats(name, nproc)) for name in rest))), alone)
        if "actor" not in names:
            return _shortest([seated(seats, None, self.reward, self.problem) for seats in beside], alone)
        out = []
        for actor in self.seats("actor", nproc):
            for tp in tensor_sizes(actor.role, nproc, self.problem.hardware):
                made = [seated((actor, *seats), tp, self.reward, self.problem) for seats in beside]
                out += _shortest(made, alone)
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
        return min(self.needs(seats) for seats in product(*(_useful(self.seats(n, nproc)) for n in names)))

    def needs(self, seats: Sequence[Seat]) -> float:
        """Bytes of the fullest rank of these with the smallest cache that works."""
        actor = next((s for s in seats if s.role.name == "actor"), None)
        others = [] if actor is None or self.reward is None else [self.reward]
        held = sum(s.kept for s in [*seats, *others]) + max(s.passing for s in [*seats, *others])
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


def _useful(seats: Sequence[Seat]) -> list[Seat]:
    """Without those that another beats in memory and in time."""
    return [s for (s,) in _front([(s,) for s in seats], False)]


def _front(groups: Sequence[tuple[Seat, ...]], alone: bool) -> list[tuple[Seat, ...]]:
    """Groups that no other beats in what is kept, what passes, scoring and training; alone: there is no other pool to
    wait for, so that only the sum of the two counts.
    """

    def marks(g: tuple[Seat, ...]) -> tuple[float, ...]:
        passing = max((s.passing for s in g), default=0.0)
        score, train = sum(s.score_s for s in g), sum(s.train_s for s in g)
        return (sum(s.kept for s in g), passing, *((score + train,) if alone else (score, train)))

    return [g for _, g in _undominated([(marks(g), g) for g in groups])]


def _shortest(pools: Sequence[Pool | None], alone: bool) -> list[Pool]:
    """Of those that fit the ones that no other beats in seconds of any stage, or alone in their sum."""
    there = [pool for pool in pools if pool is not None]
    if alone:
        return [min(there, key=lambda p: p.first + p.score + p.train)] if there else []
    return [p for _, p in _undominated([((p.first, p.score, p.train), p) for p in there])]


def _undominated(marked: Sequence[tuple[tuple[float, ...], T]]) -> list[tuple[tuple[float, ...], T]]:
    """Those whose marks no other's are all at most; of equals the first."""
    out: list[tuple[tuple[float, ...], T]] = []
    for marks, item in sorted(marked, key=lambda m: m[0]):
        if not any(all(a <= b for a, b in zip(other, marks, strict=True)) for other, _ in out):
            out.append((marks, item))
    return out
