"""What a search found, as rows, as sentences, and as plain data."""

from __future__ import annotations

from typing import Any

from verl.config.parallel import ParallelConfig
from verl.parallel.layout import Layout
from verl.planning.hardware import USABLE
from verl.planning.overrides import overrides
from verl.planning.pool import Pool
from verl.planning.proposal import Plan
from verl.planning.search import Miss, Search
from verl.planning.shape import of_parameter
from verl.planning.space import Problem

HEADS = ("", "placement", "GPUs", "layout", "generate", "score", "train", "reshard", "step", "samples/s", "GB a GPU")
Row = tuple[str, ...]


def rows(plans: list[Plan], problem: Problem) -> list[Row]:
    """One for each plan, as HEADS; seconds of a step's stages, and the memory of the fullest GPU of each pool."""
    out = []
    for i, plan in enumerate(plans, 1):
        stages = (plan.generate, plan.score, plan.train, plan.reshard, plan.seconds)
        rate = problem.work.sequences / plan.seconds
        sizes = "+".join(str(pool.nproc) for pool in plan.pools)
        memory = ", ".join(f"{pool.memory / 1e9:.1f}" for pool in plan.pools)
        seconds = [f"{s:.2f}" for s in stages]
        out.append((str(i), plan.placement, sizes, layout_text(plan), *seconds, f"{rate:.2f}", memory))
    return out


def layout_text(plan: Plan) -> str:
    """The layout of each role; roles laid out as the actor are not named."""
    actor = plan.seat("actor").layout
    lines = [f"{_axes(actor)}, generates with tp {plan.generation.tp}"]
    for pool in plan.pools:
        for seat in pool.seats:
            if seat.role.name != "actor" and seat.layout != actor:
                lines.append(f"{seat.role.name}: {_axes(seat.layout)}")
    return "\n".join(lines)


def _axes(layout: Layout) -> str:
    return f"dp {layout.dp} fsdp {layout.fsdp} tp {layout.tp} pp {layout.pp}"


def reasons(best: Plan, problem: Problem, search: Search) -> list[str]:
    """What takes the time of each stage of the best plan, its memory, and what did not fit by how much."""
    made, hw = best.generation, problem.hardware
    out = [f"Generate: {_share(made.parts)}; {made.at_once} sequences at once on a replica, {_waves(made.waves)}."]
    if best.score > 0:
        out.append(_stage("Score", best, "score"))
    out.append(_stage("Train", best, "train"))
    actor = best.seat("actor").layout
    if best.reshard > 0:
        out.append(f"Reshard: from {_axes(actor)} to tp {made.tp}, {made.weights / 1e9:.1f} GB of weights on each GPU.")
    elif made.weights == 0:
        out.append("Reshard: nothing moves, generation reads the trainer's own weights.")
    else:
        out.append(f"Reshard: nothing travels; generation's copy takes {made.weights / 1e9:.1f} GB on each GPU.")
    out += [_memory(pool, problem) for pool in best.pools]
    if best.gpus < hw.gpus:
        out.append(f"{hw.gpus - best.gpus} of {hw.gpus} GPUs stay idle: no placement that uses them is faster.")
    out += [f"Did not fit: {_miss(miss, problem)}." for miss in _simplest(best, problem, search) + search.misses()]
    return out


def _stage(name: str, plan: Plan, of: str) -> str:
    """Which pool and role a stage waits for, and what takes its time."""
    pool = max(plan.pools, key=lambda p: float(getattr(p, of)))
    seat = max(pool.seats, key=lambda s: float(getattr(s, f"{of}_s")))
    others = sorted({p.nproc for p in plan.pools if p is not pool})
    waits = f"waits for {seat.role.name} ({getattr(pool, of):.2f} s)" if others else f"{seat.role.name} takes most"
    before = (
        f"; before, the reward model on the actor's GPUs, {plan.reward:.2f} s" if of == "score" and plan.reward else ""
    )
    return f"{name}: {waits}: {_share(getattr(seat, of))}{before}."


def _share(parts: dict[str, float]) -> str:
    """The largest parts, in percent; those under 5 are left out."""
    total = sum(parts.values())
    shares = sorted(((seconds / total, name) for name, seconds in parts.items()), reverse=True) if total else []
    return ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.05) or "nothing"


def _waves(waves: int) -> str:
    return "all of a step's" if waves == 1 else f"in {waves} waves"


def _memory(pool: Pool, problem: Problem) -> str:
    names = " + ".join(seat.role.name for seat in pool.seats)
    have = problem.hardware.gpu_memory_gb
    parts = [f"{seat.role.name} {seat.kept / 1e9:.1f}" for seat in pool.seats]
    if pool.reward is not None:
        parts.append(f"reward {pool.reward.kept / 1e9:.1f}")
    if pool.generation is not None:
        parts.append(f"cache {pool.generation.cache / 1e9:.1f}")
        if pool.generation.weights:
            parts.append(f"weights to generate {pool.generation.weights / 1e9:.1f}")
    return f"Memory of {names}: {pool.memory / 1e9:.1f} GB a GPU of {have:g} ({USABLE:.0%} usable): {', '.join(parts)}."


def _simplest(best: Plan, problem: Problem, search: Search) -> list[Miss]:
    """Plain data parallelism in the place of the best plan's layouts, where its memory is too small for it."""
    out = []
    for pool in best.pools:
        if any(seat.layout.fsdp * seat.layout.tp * seat.layout.pp > 1 for seat in pool.seats):
            plain = [search.plain(seat.role.name, pool.nproc) for seat in pool.seats]
            if (needs := search.needs(plain)) > problem.hardware.usable:
                names = " + ".join(seat.role.name for seat in pool.seats)
                out.append(Miss(f"{names} whole on every GPU (fsdp 1, tp 1, pp 1)", needs))
    return out


def _miss(miss: Miss, problem: Problem) -> str:
    over = (miss.needs - problem.hardware.usable) / 1e9
    return f"{miss.what} needs {miss.needs / 1e9:.1f} GB a GPU, {over:.1f} more than is usable"


def refusal(problem: Problem, search: Search) -> str:
    """Why nothing fits, and how many GPUs would do."""
    hw, smallest = problem.hardware, search.smallest()
    states = []
    for role in problem.roles:
        n = role.shape.num_params(role.head)
        states.append(
            f"{role.name} {n / 1e9:.1f}B parameters x {sum(of_parameter(role.width, role.trains).values())} bytes"
        )
    misses = "; ".join(_miss(miss, problem) for miss in search.misses())
    more = f"--gpus {smallest} would do" if smallest else "more GPUs of this size do not help either"
    return (
        f"--gpus: nothing fits into {hw.gpus} of {hw.gpu_memory_gb:g} GB ({', '.join(states)}): {misses}; {more}, "
        "or set update.activation_checkpointing=true, update.cpu_offload=true or a lower update.micro_batch_tokens"
    )


def data(plans: list[Plan], problem: Problem, search: Search, have: ParallelConfig) -> dict[str, Any]:
    """For --json."""
    return {
        "gpus": problem.hardware.gpus,
        "gpu_memory_gb": problem.hardware.gpu_memory_gb,
        "plans": [_plan(plan, problem, have) for plan in plans],
        "reasons": reasons(plans[0], problem, search),
    }


def _plan(plan: Plan, problem: Problem, have: ParallelConfig) -> dict[str, Any]:
    stages = ("generate", "score", "train", "reshard")
    made = plan.generation
    return {
        "placement": plan.placement,
        "gpus": plan.gpus,
        "seconds": {"step": plan.seconds, **{stage: getattr(plan, stage) for stage in stages}},
        "samples_per_second": problem.work.sequences / plan.seconds,
        "pools": [_pool(pool) for pool in plan.pools],
        "generation": {"tp": made.tp, "sequences_at_once": made.at_once, "waves": made.waves, "parts": made.parts},
        "overrides": overrides(plan, have),
    }


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        "nproc": pool.nproc,
        "memory_gb": pool.memory / 1e9,
        "roles": {
            seat.role.name: {
                "dp": seat.layout.dp,
                "fsdp": seat.layout.fsdp,
                "tp": seat.layout.tp,
                "pp": seat.layout.pp,
                "score": seat.score,
                "train": seat.train,
            }
            for seat in pool.seats
        },
    }
