"""Roles that share processes: what they hold, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.parallel.layout import Layout
from verl.planning import cost
from verl.planning.cost import Generation, Parts
from verl.planning.shape import Role
from verl.planning.space import Problem


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
    """Roles that share `nproc` processes. reward: the reward model, where the actor is; first: seconds of generation,
    resharding and the reward model; score, train: of all roles one after the other; memory: bytes of the fullest rank.
    """

    nproc: int
    seats: tuple[Seat, ...]
    reward: Seat | None
    generation: Generation | None
    memory: float
    first: float
    score: float
    train: float


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


def reward_seat(actor: Seat | None, problem: Problem) -> Seat | None:
    """The reward model as `layout_of` puts it beside the actor: data ranks only, sharded as the actor is."""
    if actor is None or problem.reward is None:
        return None
    return seat(problem.reward, Layout(dp=actor.layout.world, fsdp=actor.layout.fsdp), problem)


def seated(seats: Sequence[Seat], tp: int | None, problem: Problem) -> Pool | None:
    """These roles in one pool; tp: of the layout that generates, None where the actor is not here. None: does not fit.

    The fullest rank holds what all roles keep, the cache, and what passes while the most demanding of them works.
    """
    actor = next((s for s in seats if s.role.name == "actor"), None)
    reward = reward_seat(actor, problem)
    held, made, nproc = resting(seats, reward), None, seats[0].layout.world
    if actor is not None and tp is not None:
        held += cost.copied(actor.role, actor.layout, tp)
        room = problem.hardware.usable - held
        made = cost.generation(actor.role, problem.work, actor.layout, tp, room, problem.hardware)
        if made is None:
            return None
        held += made.cache
    if held > problem.hardware.usable:
        return None
    first = 0.0 if made is None else sum(made.parts.values()) + made.reshard
    first += 0.0 if reward is None else reward.score_s
    score, train = sum(s.score_s for s in seats), sum(s.train_s for s in seats)
    return Pool(nproc, tuple(seats), reward, made, held, first, score, train)


def resting(seats: Sequence[Seat], reward: Seat | None) -> float:
    """Bytes of a rank of these roles without a cache."""
    here = [*seats, *([] if reward is None else [reward])]
    return sum(s.kept for s in here) + max(s.passing for s in here)
