"""What each of eight processes does in the tests of transport: several layouts, one start, few imports."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.weights.parameters import even, rows, tiny_model
from verl.core.errors import WeightsError
from verl.parallel.layout import Layout
from verl.weights.gather import AllGather
from verl.weights.groups import Groups, generation_coords
from verl.weights.plan import plan
from verl.weights.publisher import RankPublisher
from verl.weights.route import Route
from verl.weights.shards import Parameter, shards
from verl.weights.transport import Transport

WORLD = 8
LATE = 7
"""The rank that does not come to the last case."""


@dataclass(frozen=True)
class Job:
    """One pair of layouts, moved in both ways."""

    parameters: tuple[Parameter, ...]
    train: Layout
    generation: Layout
    groups: Groups
    bucket: int

    def dtype(self, number: int) -> torch.dtype:
        return (torch.float32, torch.bfloat16, torch.float64)[number % 3] if self.mixed else torch.float32

    @property
    def mixed(self) -> bool:
        return any(not p.shape for p in self.parameters)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {p.name: self.dtype(i) for i, p in enumerate(self.parameters)}

    def route(self, rank: int) -> Route:
        src = shards(self.parameters, self.train)
        dst = shards(self.parameters, self.generation, generation_coords(self.train, self.generation, self.groups))
        return Route.of(rank, plan(src, dst), src, dst, self.dtypes, self.bucket)

    def truth(self) -> dict[str, torch.Tensor]:
        """Whole parameters; small whole numbers, exact in every dtype."""
        return {
            p.name: ((torch.arange(prod(p.shape)) * 7 + i) % 251).view(p.shape).to(self.dtypes[p.name])
            for i, p in enumerate(self.parameters)
        }


JOBS = {
    "everything": Job(tiny_model(), Layout(dp=2, pp=2, tp=2), Layout(dp=4, tp=2), "strided", 200),
    "fsdp": Job(tiny_model(), Layout(dp=4, tp=2, fsdp=4), Layout(dp=2, tp=4), "consecutive", 1 << 20),
    "uneven": Job(tiny_model(), Layout(tp=8), Layout(dp=2, pp=2, tp=2), "strided", 64),
    "tp": Job(even(8), Layout(tp=8), Layout(dp=4, tp=2), "strided", 4096),
    "pp": Job(even(8), Layout(pp=4, tp=2), Layout(dp=2, pp=2, tp=2), "strided", 4096),
    "rows": Job(rows(4), Layout(tp=8), Layout(dp=4, tp=2), "strided", 2000),
    "finer": Job(even(4), Layout(dp=4, tp=2), Layout(dp=2, tp=4), "strided", 4096),
}


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    report: dict[str, Any] = {name: _job(job, rank) for name, job in JOBS.items()}
    report["publish"] = _publish(JOBS["everything"], rank)
    report["late"] = _late(JOBS["tp"], rank, Path(folder))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))
    # No goodbye: connections to the rank that was late are broken.


def _job(job: Job, rank: int) -> dict[str, Any]:
    route, truth = job.route(rank), job.truth()
    have = {name: _cut(truth[name], box).requires_grad_() for name, box in route.holds.items()}
    transport = Transport(route)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        got = transport.collect(have)
    gather = AllGather(job.parameters, route.dtypes, job.train, route.wants)
    arms = {"planned": (transport, got), "all-gather": (gather, gather.collect(have))}
    out: dict[str, Any] = {"measured": _peak(seen)}
    for name, (arm, tensors) in arms.items():
        wrong = [key for key, box in route.wants.items() if not torch.equal(tensors[key], _cut(truth[key], box))]
        out[name] = {
            "wrong": wrong + sorted(set(tensors) ^ set(route.wants)),
            "views": [key for key in tensors if key in have and _storage(tensors[key]) == _storage(have[key])],
            **asdict(arm.traffic),
        }
    return out


def _cut(tensor: torch.Tensor, box: Any) -> torch.Tensor:
    return tensor[tuple(slice(*side) for side in box)].clone()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _peak(seen: profile) -> int:
    """Highest sum of what torch's allocator gave out and took back while it was watched."""
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


class Engine:
    """Of a rollout engine's methods those that a publisher calls."""

    def __init__(self, names: list[str]):
        self.names, self.got, self.version = names, dict[str, torch.Tensor](), 0

    def wanted(self) -> list[str]:
        return self.names

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        self.got[name] = tensor.clone()

    def commit(self, version: int) -> None:
        self.version = version


def _publish(job: Job, rank: int) -> bool:
    """Two versions, one after the other; true where the engine has the second of each."""
    route, truth = job.route(rank), job.truth()
    have = {name: _cut(truth[name], box) for name, box in route.holds.items()}
    engine = Engine(list(route.wants))
    publisher = RankPublisher(engine, lambda: have, Transport(route))  # type: ignore[arg-type]
    publisher.publish(1)
    for tensor in have.values():
        tensor.add_(1)
    publisher.publish(2)
    right = all(torch.equal(engine.got[name], _cut(truth[name] + 1, box)) for name, box in route.wants.items())
    return right and engine.version == 2


def _late(job: Job, rank: int, folder: Path) -> str:
    """What a rank says that needs something from one that does not come."""
    route, truth = job.route(rank), job.truth()
    dist.barrier()
    transport = Transport(route, deadline_seconds=2.0)
    if rank == LATE:
        end = time.monotonic() + 20
        while time.monotonic() < end and len(list(folder.glob("*.json"))) < WORLD - 1:
            time.sleep(0.05)
        return "late"
    try:
        transport.collect({name: _cut(truth[name], box) for name, box in route.holds.items()})
    except WeightsError as e:
        return str(e)
    return "done"
