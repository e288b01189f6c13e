"""Pools side by side: a plan of a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.planning.cost import Generation
from verl.planning.pool import Pool, Seat
from verl.planning.shape import RoleName


@dataclass(frozen=True)
class Plan:
    """One placement with sizes and layouts. Seconds of a step: stages follow each other, pools work side by side.

    reward: seconds of the reward model, which are a part of `score`: all roles wait for it.
    """

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


def join(placement: str, pools: Sequence[Pool]) -> Plan:
    """Pools side by side: a stage takes as long as the pool that needs longest for it."""
    made = next(pool.generation for pool in pools if pool.generation is not None)
    reward = sum(pool.reward.score_s for pool in pools if pool.reward is not None)
    return Plan(
        placement,
        tuple(pools),
        sum(made.parts.values()),
        max(pool.score for pool in pools) + reward,
        max(pool.train for pool in pools),
        made.reshard,
        reward,
    )
