"""Processes on Ray, on this machine or on a cluster, in pools. The only file that imports ray.

The roles that are put on one pool share its processes and take turns; those on different pools run at the same time.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

from verl.controller.executors.call import Call
from verl.controller.executors.processes import GONE, end_processes, stopped_processes
from verl.controller.host import Host
from verl.controller.rank import Rank
from verl.controller.resident import Resident
from verl.core.errors import ConfigError, MissingDependency, WorkerError
from verl.core.span import Span
from verl.parallel.layout import Layout

Place = tuple[str, str, int]
"""(node id, address of the node, process id)."""
_BLAME = 2.0
"""Seconds in which Ray tells of a process that has died, after another raised because of it."""
_KNOCK = 5.0
"""Seconds in which the address of a cluster takes a connection."""
_SPANS = 10_000
"""That a timeline holds: minutes of a run, and no memory that grows."""


def load_ray() -> Any:
    """The module with what is used of it, or MissingDependency with what to install."""
    try:
        import ray
        import ray.cloudpickle
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as e:
        raise MissingDependency('parallel.executor: ray is not installed; run: pip install -e ".[ray]"') from e
    return ray


def reachable(address: str) -> None:
    """ConfigError where nothing listens at HOST:PORT, which Ray itself waits for a minute to say; `auto` is Ray's."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not colon or not port.isdecimal():
        raise ConfigError(f"parallel.address: {address!r} is none of auto, HOST:PORT, ray://HOST:PORT")
    try:
        socket.create_connection((host, int(port)), _KNOCK).close()
    except (OSError, OverflowError) as e:
        raise ConfigError(f"parallel.address: nothing answers at {address} ({e}); start Ray there, or set null") from e


class Process(Host):
    """A host that says where it is."""

    def where(self) -> Place:
        ray = load_ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()


class Cluster:
    """Ray and what was started on it: `with Cluster(...) as cluster:` leaves nothing running.

    cpus: what a Ray that is started on this machine may hand out; address: of one that runs already, in place of
    starting one; deadline: seconds that a call may take from the moment it is made (roles on one pool wait for each
    other). timeline: what the ranks did in the last calls; whoever shows it clears it.

    Whatever fails in a call ends all processes of all pools, as ranks may wait for each other for ever.
    """

    def __init__(self, cpus: int = 1, address: str | None = None, deadline: float = 1800.0):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self.ray, self.deadline = load_ray(), deadline
        self.pools: list[ResourcePool] = []
        self.timeline: deque[Span] = deque(maxlen=_SPANS)
        self._calls: list[Call] = []
        if address is not None:
            reachable(address)
        own: dict[str, Any] = {"include_dashboard": False, "num_cpus": cpus} if address is None else {}
        try:
            self.ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **own)
        except ConnectionError as e:
            raise ConfigError(
                f"parallel.address: no Ray answers at {address}; start it there, or set null (where its log says "
                "Unauthenticated, set RAY_AUTH_MODE=token and use the cluster's token)"
            ) from e
        atexit.register(self.close)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and leave Ray; a second time does nothing."""
        if self.ray.is_initialized():
            self.kill(WorkerError("the cluster was closed", role="pool", rank=0, method="close"))
            self.ray.shutdown()
        atexit.unregister(self.close)

    def kill(self, why: WorkerError) -> None:
        """End every process of every pool at once, also one that is stopped. why: what later calls on them raise."""
        pools, self.pools = self.pools, []
        self._calls.clear()
        for pool in pools:
            pool.dead = why
        for pool in pools:
            for process in pool.processes:
                self.ray.kill(process, no_restart=True)
        # Ray asks a process to end, and one that is stopped does not listen.
        self._on_nodes(end_processes, [place for pool in pools for place in pool.places])
        for pool in pools:
            self.ray.util.remove_placement_group(pool.group)

    def fail(self, error: WorkerError) -> NoReturn:
        self.kill(error)
        raise error

    def _on_nodes(self, work: Callable[[Sequence[int]], list[int]], places: Sequence[Place]) -> set[tuple[str, int]]:
        """Do `work` with the process ids of each node on that node: (node id, process id) of those that it returns. A
        node that does not answer in time returns none.
        """
        here = self.ray.get_runtime_context().get_node_id()
        pids: dict[str, list[int]] = {}
        for node, _, pid in places:
            pids.setdefault(node, []).append(pid)
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        jobs = {}
        for node in pids.keys() - {here}:
            there = self.ray.remote(work).options(num_cpus=0, scheduling_strategy=strategy(node, soft=True))
            jobs[there.remote(pids[node])] = node
        done = {here: work(pids.get(here, []))}
        ready, _ = self.ray.wait(list(jobs), num_returns=len(jobs), timeout=GONE) if jobs else ([], [])
        done |= {jobs[job]: self.ray.get(job) for job in ready}
        return {(node, pid) for node, some in done.items() for pid in some}

    def call(self, role: str, method: str, refs: dict[Any, int], places: Sequence[Place], sent: int = 0) -> Call:
        """Watch over a call that has just been sent. refs: its answers to be, and the rank of each."""
        call = Call(role, method, refs, time.monotonic() + self.deadline, places, sent)
        self._calls.append(call)
        return call

    def drive(self, call: Call) -> Call:
        """Take replies, of any call, until `call` has all of its own. What fails in any of them is raised here."""
        while call.pending:
            waiting = {ref: c for c in self._calls for ref in c.pending}
            first = min((c for c in self._calls if c.pending), key=lambda c: c.expires)
            ready, _ = self.ray.wait(list(waiting), timeout=max(0.0, first.expires - time.monotonic()))
            if not ready:
                self.fail(self._silent(first))
            for ref in ready:
                self._take(waiting[ref], ref)
        self._calls = [c for c in self._calls if c.pending]
        return call

    def _take(self, call: Call, ref: Any) -> None:
        rank = call.pending[ref]
        try:
            data = self.ray.get(ref)
        except self.ray.exceptions.RayError as e:
            self.fail(self._lost(call, rank, e))
        reply = call.take(ref, data)
        if reply.error:
            self.fail(self._dead() or _error(call, rank, reply.error, reply.traceback))

    def _lost(self, call: Call, rank: int, error: Exception) -> WorkerError:
        if isinstance(error, self.ray.exceptions.RayActorError):
            cause = "where nobody killed it, its machine may have run out of memory"
            return _error(call, rank, f"its process has died ({cause}); all others were ended")
        return _error(call, rank, type(error).__name__, str(error))

    def _dead(self) -> WorkerError | None:
        """Of a process that has died, where one has: peers that met it in a collective raise, and are not to blame."""
        waiting = {ref: call for call in self._calls for ref in call.pending}
        if not waiting:
            return None
        ready, _ = self.ray.wait(list(waiting), num_returns=len(waiting), timeout=_BLAME)
        for ref in ready:
            try:
                self.ray.get(ref)
            except self.ray.exceptions.RayActorError as e:
                return self._lost(waiting[ref], waiting[ref].pending[ref], e)
        return None

    def _silent(self, call: Call) -> WorkerError:
        """Of a call whose deadline has passed. A process that is stopped is named before those that may wait for it."""
        ranks = sorted(call.pending.values())
        placed = {rank: (call.places[rank][0], call.places[rank][2]) for rank in ranks if rank < len(call.places)}
        found = self._on_nodes(stopped_processes, [call.places[rank] for rank in placed])
        stopped = [rank for rank in ranks if placed.get(rank) in found]
        what = f"no answer within {self.deadline:g} seconds (parallel.deadline)"
        what += ", its process is stopped" * bool(stopped)
        what += f"; ranks {', '.join(map(str, ranks))} were waited for" * (len(ranks) > 1)
        return _error(call, (stopped or ranks)[0], f"{what}; all processes were ended")


def _error(call: Call, rank: int, what: str, trace: str = "") -> WorkerError:
    return WorkerError(what, role=call.role, rank=rank, method=call.method, traceback=trace)


class ResourcePool:
    """`world` processes, each with `cpus` and `gpus`, and `threads` of torch (None: as torch has it).

    backend: of torch.distributed, which gets one process group over all of them where there are several.
    """

    def __init__(
        self,
        cluster: Cluster,
        world: int,
        cpus: float = 1,
        gpus: float = 0,
        threads: int | None = None,
        backend: str = "gloo",
    ):
        self.cluster, self.world = cluster, world
        self.resident = Resident()
        self.dead: WorkerError | None = None
        self.places: list[Place] = []
        self.processes: list[Any] = []
        self.master = ("", 0)
        self.group = self._room(cpus, gpus)
        cluster.pools.append(self)
        ray = cluster.ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for i in range(world):
            at = strategy(self.group, placement_group_bundle_index=i)
            made = ray.remote(Process).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=at, max_restarts=0)
            self.processes.append(made.remote(threads))
        self.places = self.setup("pool", "where", [()] * world)
        if world > 1:
            self._join(backend)

    def _room(self, cpus: float, gpus: float) -> Any:
        """Resources that are ours, near each other."""
        ray = self.cluster.ray
        have, need = ray.cluster_resources(), {"CPU": cpus * self.world, "GPU": gpus * self.world}
        for what, count in need.items():
            if have.get(what, 0) < count:
                raise ConfigError(
                    f"parallel.nproc: {self.world} processes need {count:g} {what}s and Ray has {have.get(what, 0):g}; "
                    "lower it"
                )
        bundle = {what: count / self.world for what, count in need.items() if count}
        group = ray.util.placement_group([bundle] * self.world, strategy="PACK")
        ready, _ = ray.wait([group.ready()], timeout=self.cluster.deadline)
        if not ready:
            ray.util.remove_placement_group(group)
            raise ConfigError(f"parallel.nproc: {need} were not free within {self.cluster.deadline:g} seconds")
        return group

    def setup(self, role: str, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` of the hosts of the first ranks, each with its own arguments; what they return."""
        self.check_alive()
        pairs = zip(self.processes, args, strict=False)
        refs = {process.setup.remote(method, *own): rank for rank, (process, own) in enumerate(pairs)}
        return self.cluster.drive(self.cluster.call(role, method, refs, self.places)).values()

    def _join(self, backend: str) -> None:
        nodes = {node for node, _, _ in self.places}
        host = self.places[0][1] if len(nodes) > 1 else "127.0.0.1"
        self.master = (host, self.setup("pool", "open_store", [(host,)])[0])
        limit = self.cluster.deadline
        self.setup("pool", "join", [(rank, backend, limit) for rank in self.ranks(Layout(dp=self.world))])

    def ranks(self, layout: Layout) -> list[Rank]:
        return [Rank(r, layout, self.master) for r in range(self.world)]

    def check_alive(self) -> None:
        if self.dead is not None:
            raise self.dead
