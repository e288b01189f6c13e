"""Transport and the all-gather arm in eight processes over gloo: values, bytes, memory, a rank that does not come."""

import json
import multiprocessing as mp
from fractions import Fraction
from math import prod

import pytest

from tests.weights.processes import JOBS, LATE, WORLD, main

CASES = [(name, arm) for name in JOBS for arm in ("planned", "all-gather")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank saw. One import of torch for all: the server that forks them has it."""
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.weights.processes"])
    ranks = [context.Process(target=main, args=(rank, str(folder))) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
    assert codes == [0] * WORLD
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def of(reports, name, arm):
    return [report[name][arm] for report in reports]


def model_bytes(job):
    return sum(prod(p.shape) * job.dtypes[p.name].itemsize for p in job.parameters)


@pytest.mark.parametrize(("name", "arm"), CASES)
def test_every_rank_has_what_it_generates_with(reports, name, arm):
    assert [rank["wrong"] for rank in of(reports, name, arm)] == [[]] * WORLD


@pytest.mark.parametrize(("name", "arm"), CASES)
def test_what_is_sent_is_received(reports, name, arm):
    ranks = of(reports, name, arm)
    assert sum(rank["sent"] for rank in ranks) == sum(rank["received"] for rank in ranks)
    assert [rank["buffers"] for rank in ranks] == [rank["open"] for rank in ranks] == [0] * WORLD


@pytest.mark.parametrize("name", ["tp", "pp", "rows"])
def test_bytes_and_memory_are_those_of_the_formulas(reports, name):
    """Planned: M (tp pp - tg pg) / (tg pg tp pp) received, and what is not a view, M / (tg pg) at most, of new tensors.
    Besides there are messages: a bucket a direction.
    """
    job = JOBS[name]
    total, held = model_bytes(job), job.train.tp * job.train.pp
    generated = job.generation.tp * job.generation.pp
    ranks = of(reports, name, "planned")
    assert [rank["received"] for rank in ranks] == [Fraction(total * (held - generated), held * generated)] * WORLD
    assert [rank["kept"] for rank in ranks] == [Fraction(total, held)] * WORLD
    views = Fraction(total, held) if name == "pp" else 0  # tp stays the same, so whole layers do
    assert [rank["made"] for rank in ranks] == [Fraction(total, generated) - views] * WORLD
    assert all(rank["peak"] <= rank["made"] + 2 * job.bucket for rank in ranks)
    gathered = of(reports, name, "all-gather")
    assert [rank["received"] for rank in gathered] == [Fraction(total * (held - 1), held)] * WORLD
    assert [rank["made"] for rank in gathered] == [Fraction(total, generated)] * WORLD
    largest = max(prod(p.shape) for p in job.parameters) * 4
    assert all(rank["made"] + largest <= rank["peak"] <= rank["made"] + 2 * largest for rank in gathered)


def test_rows_arrive_in_place(reports):
    """Cut along dimension 0, a parameter a round: peak extra memory is M / (tg pg), not a byte more."""
    ranks = of(reports, "rows", "planned")
    assert [rank["peak"] for rank in ranks] == [Fraction(model_bytes(JOBS["rows"]), 2)] * WORLD
    assert all(rank["streamed_peak"] == rank["peak"] // 4 for rank in ranks), "one parameter of four at a time"


@pytest.mark.parametrize("name", list(JOBS))
def test_memory_is_what_the_allocator_gave(reports, name):
    """Torch's own count of allocations, which also sees small temporaries, is never below ours and hardly above."""
    for report in reports:
        counted = report[name]["planned"]["peak"]
        assert counted <= report[name]["measured"] <= counted * 1.05 + 256


def test_shards_within_training_shards_are_views(reports):
    for rank in of(reports, "finer", "planned"):
        assert (rank["sent"], rank["received"], rank["made"], rank["peak"]) == (0, 0, 0, 0)
        assert len(rank["views"]) == len(JOBS["finer"].parameters)


def test_a_publisher_on_each_rank(reports):
    assert [report["publish"] for report in reports] == [True] * WORLD


def test_a_rank_that_does_not_come_is_an_error_that_names_it(reports):
    """Ranks 4 to 7 generate with the same half, of which rank 7 holds a part; the others never talk to it."""
    said = [report["late"] for report in reports]
    assert said[LATE] == "late"
    assert said[:4] == ["done"] * 4
    failed = said[4:LATE]
    assert all("not done within 2 s" in text for text in failed)
    assert any(f"bytes from rank {LATE}" in text for text in failed)
