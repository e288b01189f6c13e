"""Groups on Ray, with real processes: what travels, what runs together, and that every failure ends all of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from tests.controller.ray_workers import Weights, broken, probe
from verl.controller.executors.ray import Cluster, ResourcePool
from verl.controller.executors.ray_group import RayGroup
from verl.controller.group import gather
from verl.core.batch import Batch, cumulative
from verl.core.errors import ConfigError, WorkerError
from verl.parallel.layout import Layout
from verl.utils.timeline import at_once

DEADLINE = 20.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(cpus=3, deadline=DEADLINE) as made:
        yield made


def batch_of(lengths: list[int], groups: list[int]) -> Batch:
    tokens = sum(lengths)
    cols = {
        "token_ids": torch.arange(tokens),
        "group_id": torch.tensor(groups),
        "loss_mask": torch.arange(tokens) % 2 == 0,
    }
    return Batch(cumulative(torch.tensor(lengths)), cols)


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def pids_of(*groups: RayGroup) -> list[int]:
    return [pid for group in groups for _, _, pid in group.pool.places]


def expect_end(cluster: Cluster, pids: list[int], within: float, run) -> WorkerError:
    """`run` ends with a WorkerError in time, and no process of any pool is left."""
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        run()
    assert time.monotonic() - start < within
    assert not alive(pids) and not cluster.pools
    return caught.value


def test_calls_on_two_processes(cluster: Cluster) -> None:
    """One pair of processes with two roles, one process beside it; then a worker raises while the others wait."""
    pair, single = ResourcePool(cluster, 2, threads=1), ResourcePool(cluster, 1, threads=1)
    a, b = RayGroup(pair, "a", Layout(dp=2), probe(1.5)), RayGroup(pair, "b", Layout(dp=1, tp=2), probe(2.5))
    c = RayGroup(single, "c", Layout(), probe(3.5))

    told = a.call("tell").result()
    assert [(rank, world, number) for rank, world, _, number in told] == [(0, 2, 1.5), (1, 2, 1.5)]
    assert [t[2] for t in told] == [t[2] for t in b.call("tell").result()] == pids_of(a), (
        "roles of a pool share processes"
    )
    assert len({*pids_of(a, c)}) == 3 and os.getpid() not in pids_of(a, c)
    assert a.call("own", value=[4, 5]).result() == [40, 51] and a.call("lead").result() == 0
    with pytest.raises(ValueError, match="one value a rank, 2 in all"):
        a.call("own", value=[4])
    with pytest.raises(AttributeError, match="not marked"):
        a.call("operations")

    _check_columns(a, b)
    _check_both_at_once(a, c)
    _check_empty_rank(a)

    error = expect_end(cluster, pids_of(a, c), 10, lambda: a.call("meet_but", absent=1).result())
    assert (error.role, error.rank, error.method) == ("a", 1, "meet_but")
    assert str(error).startswith("a, rank 1, meet_but: ValueError: no meeting (ray_workers.py, line ")
    assert "raise ValueError" in error.traceback
    with pytest.raises(WorkerError, match="a, rank 1, meet_but"):
        c.call("tell")


def _check_columns(a: RayGroup, b: RayGroup) -> None:
    """Values are right, in order; and a column travels once."""
    batch = batch_of([7, 3000, 5, 1000, 2000], [0, 1, 0, 2, 2])
    tokens = batch.num_tokens
    start = a.bytes_sent, a.bytes_received
    scored = a.call("score", batch).result()
    expected = (batch["token_ids"].float() * 2).where(batch["loss_mask"], 0)
    assert torch.equal(scored["values"], expected) and set(scored.cols) == {"values"}
    assert scored.cu_seqlens is batch.cu_seqlens
    sent, received = a.bytes_sent - start[0], a.bytes_received - start[1]
    assert 9 * tokens < sent < 9 * tokens + 4000 and 4 * tokens < received < 4 * tokens + 4000

    batch = batch.merge(scored)
    weights = Weights((1.0, 2.0, 3.0, 4.0, 5.0))
    by_seq = torch.stack([v.sum() for v in batch.per_seq(expected)])
    learned = a.call("learn", batch, weights=weights, scale=0.5).result().values_by_name()
    right = float((by_seq * torch.tensor(weights.values)).sum() * 0.5)
    assert learned["own"] == pytest.approx(right, rel=1e-5) == learned["all"] and learned["seqs"] == 5
    assert a.bytes_sent - start[0] < sent + 4000, "what was made there is not sent there"

    assert sorted(a.call("groups", batch).result()) == [[0, 1], [2]], "samples of a prompt stay together"
    before = a.bytes_sent
    changed = batch.with_(loss_mask=~batch["loss_mask"])
    assert torch.equal(
        a.call("score", changed).result()["values"], (batch["token_ids"].float() * 2).where(~batch["loss_mask"], 0)
    )
    assert tokens < a.bytes_sent - before < 2 * tokens + 4000, "a column that was replaced is sent again, and no other"
    assert torch.equal(
        b.call("score", changed).result()["values"], (batch["token_ids"].float() * 2).where(~batch["loss_mask"], 0)
    )
    assert b.bytes_sent > 2 * 9 * tokens, "both tensor ranks have all of it"
    assert b.bytes_received < 4 * tokens + 8000, "and one of them answers"


def _check_both_at_once(a: RayGroup, c: RayGroup) -> None:
    start = time.monotonic()
    futures = [a.call("sleep", seconds=1.0), c.call("sleep", seconds=1.0)]
    assert time.monotonic() - start < 0.5, "a call returns at once"
    a.pool.cluster.timeline.clear()
    gather(*futures)
    assert time.monotonic() - start < 1.8
    spans = list(a.pool.cluster.timeline)
    assert [(s.role, s.rank, s.method) for s in spans] == [("a", 0, "sleep"), ("a", 1, "sleep"), ("c", 0, "sleep")]
    assert all(1.0 <= s.end - s.start < 1.5 and abs(s.end - time.time()) < 1.5 for s in spans)
    assert at_once(spans) > 0.5
    assert c.stats.worker_seconds >= 1.0 and 0 <= c.stats.seconds - c.stats.worker_seconds < 0.5


def _check_empty_rank(a: RayGroup) -> None:
    """A rank without a sequence takes part all the same."""
    batch = batch_of([4], [0])
    batch = batch.merge(a.call("score", batch).result())
    learned = a.call("learn", batch, weights=Weights((1.0,)), scale=1.0).result()
    assert learned.values_by_name() == {"own": 4.0, "all": 4.0, "seqs": 1.0}


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_process_dies_or_hangs(cluster: Cluster, sign: signal.Signals) -> None:
    pool = ResourcePool(cluster, 2, threads=1)
    group = RayGroup(pool, "a", Layout(dp=2), probe())
    pids = pids_of(group)
    if sign == signal.SIGSTOP:
        cluster.deadline = 2.0
    try:
        future = group.call("sleep", seconds=60.0)
        time.sleep(0.5)
        os.kill(pids[1], sign)
        error = expect_end(cluster, pids, 10, future.result)
    finally:
        cluster.deadline = DEADLINE
    if sign == signal.SIGKILL:
        assert (error.rank, error.method) == (1, "sleep") and "has died" in str(error)
    else:
        assert "no answer within 2 seconds" in str(error)


def test_what_cannot_start(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="parallel.nproc: 9 processes need 9 CPUs and Ray has 3"):
        ResourcePool(cluster, 9)
    pool = ResourcePool(cluster, 1)
    with pytest.raises(ConfigError, match="needs 2 processes, its pool has 1"):
        RayGroup(pool, "a", Layout(dp=2), probe())
    error = expect_end(cluster, [pid for _, _, pid in pool.places], 10, lambda: RayGroup(pool, "a", Layout(), broken))
    assert str(error).startswith("a, rank 0, add: FileNotFoundError: no model")


CONTROLLER = """
import sys, time
from tests.controller.ray_workers import probe
from verl.controller.executors.ray import Cluster, ResourcePool
from verl.controller.executors.ray_group import RayGroup
from verl.parallel.layout import Layout

cluster = Cluster(cpus=1)
pool = ResourcePool(cluster, 1, threads=1)
group = RayGroup(pool, "a", Layout(), probe())
future = group.call("sleep", seconds=60.0)
print(pool.places[0][2], flush=True)
future.result()
"""


def test_a_controller_that_is_ended_leaves_no_process() -> None:
    """Neither its worker nor a process of the Ray that it started (whose agents see a SIGKILL in a minute)."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    command = [sys.executable, "-c", CONTROLLER]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in signals]
    left: dict[int, signal.Signals] = {}
    for sign, process in zip(signals, started, strict=True):
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        family = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
        assert worker in family and len(family) > 2
        left |= dict.fromkeys([worker] if sign == signal.SIGKILL else family, sign)
        process.send_signal(sign)
    assert all(process.wait(20) != 0 for process in started)
    deadline = time.monotonic() + 15
    while alive(list(left)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(list(left)), {left[pid].name for pid in alive(list(left))}
