"""The search against plain loops over everything, against laws, and on models whose answers are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.problems import B7, B70, problem, roles, tight
from verl.config import parse_override, resolve
from verl.config.parallel import ParallelConfig, RoleLayout
from verl.parallel.layout import Layout
from verl.planning import cost
from verl.planning.overrides import overrides
from verl.planning.pool import seat
from verl.planning.proposal import Plan
from verl.planning.report import reasons, refusal, rows
from verl.planning.search import Search
from verl.planning.shape import Role
from verl.planning.space import PLACEMENTS, Problem, placements

ROLES = st.sampled_from(["actor", "actor ref", "actor critic", "actor ref critic"])
PROBLEMS = st.builds(
    tight,
    st.integers(1, 6),
    st.floats(0.4, 6.0),
    ROLES,
    share_prompt=st.booleans(),
    recompute=st.booleans(),
    max_sequences=st.sampled_from([3, 8, 64]),
    epochs=st.integers(1, 2),
)


def every_layout(n: int, hw_node: int) -> Iterator[Layout]:
    for dp, pp, tp, fsdp in product(range(1, n + 1), repeat=4):
        if dp * pp * tp == n and dp % fsdp == 0 and tp in (1, 2, 4) and tp <= hw_node and pp <= 4:
            yield Layout(dp, pp, tp, fsdp)


def held(seats: list[tuple[Role, Layout]], of: Problem, tp: int | None, cache: float) -> float:
    total = sum(cost.kept(r, of.work, x) for r, x in seats) + max(cost.passing(r, of.work, x) for r, x in seats)
    if tp is not None:
        role, layout = next(s for s in seats if s[0].name == "actor")
        total += cost.copied(role, layout, tp) + cache
    return total


def brute_pools(names: list[str], n: int, of: Problem) -> Iterator[tuple[float, float, float]]:
    """(generation and resharding, scoring, training) of every choice that fits."""
    members = [of.role(name) for name in names]  # type: ignore[arg-type]
    score = {
        (r, x): sum(cost.scoring(r, of.work, x, of.hardware).values()) for r in members for x in every_layout(n, 2)
    }
    for layouts in product(every_layout(n, of.hardware.gpus_per_node), repeat=len(members)):
        seats = list(zip(members, layouts, strict=True))
        scored = sum(score[s] for s in seats)
        trained = sum(sum(cost.training(r, of.work, x, of.hardware).values()) for r, x in seats if r.trains)
        if "actor" not in names:
            if held(seats, of, None, 0) <= of.hardware.usable:
                yield 0.0, scored, trained
            continue
        for tp in (t for t in (1, 2) if n % t == 0):
            room = of.hardware.usable - held(seats, of, tp, 0)
            made = cost.generation(seats[0][0], of.work, seats[0][1], tp, room, of.hardware)
            if made is not None:
                yield sum(made.parts.values()) + made.reshard, scored, trained


def brute_force(of: Problem) -> float | None:
    """Seconds of the best step, by loops over every placement, size and layout."""
    there, best = {r.name for r in of.roles}, None
    for sets in PLACEMENTS.values():
        groups = [[name for name in s if name in there] for s in sets]
        groups = [g for g in groups if g]
        for sizes in product(of_sizes(of.hardware.gpus), repeat=len(groups)):
            if sum(sizes) > of.hardware.gpus:
                continue
            for choice in product(*(list(brute_pools(g, n, of)) for g, n in zip(groups, sizes, strict=True))):
                seconds = sum(c[0] for c in choice) + max(c[1] for c in choice) + max(c[2] for c in choice)
                best = seconds if best is None else min(best, seconds)
    return best


def of_sizes(gpus: int) -> list[int]:
    return [n for n in range(1, gpus + 1) if n <= 2 or n % 2 == 0]  # a part of a node of 2, or whole nodes


def recounted(plan: Plan, of: Problem) -> None:
    """Every pool of a plan holds no more than is usable, and the plan's seconds are those of its parts."""
    assert plan.gpus <= of.hardware.gpus
    for pool in plan.pools:
        seats = [(s.role, s.layout) for s in pool.seats]
        assert all(layout.world == pool.nproc for _, layout in seats)
        made = pool.generation
        total = held(seats, of, made.tp if made else None, made.cache if made else 0)
        assert total <= of.hardware.usable and total == pytest.approx(pool.memory)
        if made:
            assert made.at_once * made.waves * (pool.nproc // made.tp) >= of.work.sequences
            assert made.cache >= made.at_once * cost.slot(of.role("actor"), of.work, made.tp)
    score = max(
        sum(sum(cost.scoring(s.role, of.work, s.layout, of.hardware).values()) for s in p.seats) for p in plan.pools
    )
    assert plan.score == pytest.approx(score)
    assert plan.seconds == pytest.approx(plan.generate + plan.score + plan.train + plan.reshard)


@pytest.mark.parametrize(
    ("gpus", "memory_mb", "names"),
    [(1, 8, "actor ref critic"), (2, 4.5, "actor ref critic"), (2, 6, "actor"), (4, 2.4, "actor critic"),
     (4, 2.2, "actor ref"), (3, 4.0, "actor ref critic"), (4, 4.5, "actor critic"), (4, 0.05, "actor ref")],
)  # fmt: skip
def test_agrees_with_loops_over_everything(gpus: int, memory_mb: float, names: str) -> None:
    of = tight(gpus, memory_mb, names)
    found, best = Search(of).best(), brute_force(of)
    assert (best is None) == (memory_mb < 0.1)
    if best is None:
        assert found == []
    else:
        assert found[0].seconds == pytest.approx(best, rel=1e-9)
        recounted(found[0], of)


@settings(max_examples=40, deadline=None)
@given(PROBLEMS, st.floats(1.0, 3.0))
def test_more_memory_is_never_slower(of: Problem, factor: float) -> None:
    hw = of.hardware
    more = replace(of, hardware=replace(hw, gpu_memory_gb=hw.gpu_memory_gb * factor))
    before, after = Search(of).best(), Search(more).best()
    assert not before or after[0].seconds <= before[0].seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(PROBLEMS, st.integers(1, 4))
def test_more_gpus_are_never_slower(of: Problem, extra: int) -> None:
    more = replace(of, hardware=replace(of.hardware, gpus=of.hardware.gpus + extra))
    before, after = Search(of).best(), Search(more).best()
    assert not before or after[0].seconds <= before[0].seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(PROBLEMS)
def test_what_is_proposed_fits_and_is_in_order(of: Problem) -> None:
    plans = Search(of).best(5)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    for plan in plans:
        recounted(plan, of)


@settings(max_examples=40, deadline=None)
@given(
    PROBLEMS,
    st.builds(RoleLayout, fsdp=st.sampled_from([None, 1, 2]), tp=st.sampled_from([None, 1, 2]), nproc=st.just(None)),
    st.builds(RoleLayout, pp=st.sampled_from([None, 2]), nproc=st.sampled_from([None, 2])),
)
def test_overrides_make_the_configuration_of_the_plan(of: Problem, ref: RoleLayout, critic: RoleLayout) -> None:
    """Whatever the file says before: what is loaded is the plan."""
    before = {"ref": ref.model_dump(), "critic": critic.model_dump(), "executor": "embedded"}
    have = ParallelConfig(**before)
    for plan in Search(of).best(3):
        p = resolve([{"parallel": before}, *(parse_override(o) for o in overrides(plan, have))]).parallel
        actor = plan.seat("actor").layout
        assert (p.placement, p.nproc, p.fsdp, p.tp, p.pp) == (
            plan.placement, plan.pool_of("actor").nproc, actor.fsdp, actor.tp, actor.pp,
        )  # fmt: skip
        assert p.generation_tp == plan.generation.tp
        assert p.executor == ("ray" if plan.gpus > 1 else "embedded")
        for name, section in (("ref", p.ref), ("critic", p.critic)):
            for chair in (s for pool in plan.pools for s in pool.seats if s.role.name == name):
                given_ = [getattr(section, a) or getattr(p, a) for a in ("fsdp", "tp", "pp")]
                assert given_ == [chair.layout.fsdp, chair.layout.tp, chair.layout.pp]
                own = plan.pool_of(name) is not plan.pool_of("actor")  # type: ignore[arg-type]
                wanted = plan.pool_of(name).nproc  # type: ignore[arg-type]
                assert (section.nproc or p.nproc) == wanted if own else section.nproc is None


@settings(max_examples=30, deadline=None)
@given(PROBLEMS)
def test_the_smallest_number_fits_and_one_less_does_not(of: Problem) -> None:
    if Search(of).best():
        return
    smallest = Search(of).smallest()
    if smallest is not None:
        enough = replace(of, hardware=replace(of.hardware, gpus=smallest))
        short = replace(of, hardware=replace(of.hardware, gpus=smallest - 1))
        assert Search(enough).best() and smallest > of.hardware.gpus
        assert smallest == 1 or not Search(short).best()


@pytest.mark.parametrize("gpus", [8, 16, 64])
def test_7b_ppo_fits_from_one_node_on(gpus: int) -> None:
    of = problem(B7, gpus)
    plans = Search(of).best(5)
    assert len(plans) == 5
    for plan in plans:
        recounted(plan, of)
    best = plans[0]
    assert best.gpus >= 0.75 * gpus
    flops = 2 * 6.5e9 * 128 * (1024 + 8 * 1024)  # of one forward pass; steps train two models and score with three
    floor = (2 * 3 + 3) * flops / (989e12 * gpus)
    assert floor < best.seconds < 5 * floor


def test_70b_does_not_fit_on_one_node() -> None:
    of = problem(B70, 8)
    search = Search(of)
    assert search.best() == []
    smallest = search.smallest()
    # 16 bytes for each parameter of actor and critic and 2 of the reference, 72 GB usable
    assert smallest is not None and smallest >= 34 * 70e9 / 72e9
    text = refusal(of, search)
    assert text.startswith("--gpus: nothing fits into 8 of 80 GB") and f"--gpus {smallest} would do" in text
    assert "actor 70.6B parameters x 18 bytes" in text


def test_70b_on_64_gpus_is_cut() -> None:
    of = problem(B70, 64)
    best = Search(of).best()[0]
    recounted(best, of)
    actor = best.seat("actor").layout
    assert actor.fsdp * actor.tp * actor.pp >= 8
    assert best.generation.tp >= 2  # 141 GB of weights to generate with


def test_the_reward_model_is_beside_the_actor() -> None:
    """Each of the actor's GPUs scores a part with a whole copy or, as the actor, a part of one."""
    of = problem(B7, 8, "actor ref")
    more = replace(of, reward=roles(B7, "ref")[0])
    for plan in Search(more).best(5):
        pool = plan.pool_of("actor")
        fsdp, nproc = plan.seat("actor").layout.fsdp, pool.nproc
        assert pool.reward is not None and pool.reward.layout == Layout(dp=nproc, fsdp=fsdp)
        assert pool.reward.kept == pytest.approx(2 * B7.num_params(True) / fsdp)
        assert pool.memory > sum(s.kept for s in pool.seats) + pool.reward.kept
        alike = seat(more.reward, Layout(dp=nproc, fsdp=fsdp), more)  # type: ignore[arg-type]
        assert plan.reward == pytest.approx(alike.score_s) and plan.score > plan.reward
    assert Search(more).best()[0].seconds > Search(of).best()[0].seconds
    written = overrides(Search(more).best()[0], ParallelConfig.model_validate({"reward": {"fsdp": 2, "nproc": 3}}))
    assert written[-2:] == ["parallel.reward.nproc=null", "parallel.reward.fsdp=null"]


def test_words_tell_what_bounds_and_what_did_not_fit() -> None:
    of = problem(B7, 8)
    search = Search(of)
    plans = search.best(3)
    said = reasons(plans[0], of, search)
    assert said[0].startswith("Generate: ") and any(line.startswith("Train: ") for line in said)
    assert any("whole on every GPU (fsdp 1, tp 1, pp 1) needs" in line for line in said)
    assert [row[0] for row in rows(plans, of)] == ["1", "2", "3"]


def test_placements_that_say_the_same_are_tried_once() -> None:
    assert list(placements(problem(B7, 8, "actor"))) == ["colocated"]
    assert list(placements(problem(B7, 8, "actor critic"))) == ["colocated", "split"]
    assert list(placements(problem(B7, 8, "actor ref"))) == ["colocated", "standalone"]
    assert list(placements(problem(B7, 8))) == ["colocated", "split", "standalone"]
