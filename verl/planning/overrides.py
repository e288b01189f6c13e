"""A plan as the overrides that make a run follow it."""

from __future__ import annotations

from verl.config.parallel import ParallelConfig, RoleLayout
from verl.planning.proposal import Plan


def overrides(plan: Plan, have: ParallelConfig) -> list[str]:
    """`parallel.nproc=8` and so on. have: what the configuration says without them; of ref and critic only what they
    would not take over from it or from the actor is written.
    """
    actor = plan.seat("actor")
    out = [f"parallel.placement={plan.placement}", f"parallel.nproc={plan.pool_of('actor').nproc}"]
    if plan.gpus > 1:
        out.append("parallel.executor=ray")
    out += [f"parallel.{axis}={getattr(actor.layout, axis)}" for axis in ("fsdp", "tp", "pp")]
    out.append(f"parallel.generation_tp={plan.generation.tp}")
    for name, section in (("ref", have.ref), ("critic", have.critic)):
        out += [f"parallel.{name}.{key}={value}" for key, value in _role(plan, name, section)]
    given = [key for key in ("nproc", "fsdp") if getattr(have.reward, key) is not None]
    if plan.pool_of("actor").reward is not None:  # beside the actor and sharded as it, which is what null means
        out += [f"parallel.reward.{key}=null" for key in given]
    return out


def _role(plan: Plan, name: str, have: RoleLayout) -> list[tuple[str, str]]:
    """What has to be written for ref or critic: where what is there now, or the actor's, is another."""
    seats = {seat.role.name: (seat, pool) for pool in plan.pools for seat in pool.seats}
    actor, own_pool = seats["actor"]
    found = next((pair for role, pair in seats.items() if role == name), None)
    if found is None:
        return []
    seat, pool = found
    out = []
    if pool is own_pool:
        if have.nproc is not None:
            out.append(("nproc", "null"))
    elif (have.nproc or own_pool.nproc) != pool.nproc:
        out.append(("nproc", str(pool.nproc)))
    for axis in ("fsdp", "tp", "pp"):
        given, wanted = getattr(have, axis), getattr(seat.layout, axis)
        if (getattr(actor.layout, axis) if given is None else given) != wanted:
            out.append((axis, str(wanted)))
    return out
