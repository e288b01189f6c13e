"""The worker group on Ray: sends each rank what it lacks, merges what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl.controller.arguments import arguments
from verl.controller.executors.call import Call, CallStats
from verl.controller.executors.ray import ResourcePool
from verl.controller.partition import Parts, order
from verl.controller.rank import Make
from verl.controller.wire import Request, Shard, encode
from verl.controller.worker import Operation
from verl.core.batch import Batch
from verl.core.errors import ConfigError
from verl.parallel.layout import Layout


class RayGroup:
    """The workers of one role, one in each process of a pool. together: keep samples of one prompt on one rank.

    Columns stay on the ranks that got or made them until another batch comes (see `Resident`); `stats` counts.
    """

    def __init__(self, pool: ResourcePool, role: str, layout: Layout, make: Make, together: bool = True):
        if layout.world != pool.world:
            raise ConfigError(f"parallel.nproc: {role} needs {layout.world} processes, its pool has {pool.world}")
        self.pool, self.role, self.layout, self.together = pool, role, layout, together
        self.stats = CallStats()
        packed = pool.cluster.ray.cloudpickle.dumps(make)
        made = pool.setup(role, "add", [(role, packed, rank) for rank in pool.ranks(layout)])
        self._operations: dict[str, Operation] = made[0]

    @property
    def bytes_sent(self) -> int:
        return self.stats.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.stats.bytes_received

    def call(self, method: str, batch: Batch | None = None, **kwargs: Any) -> RayFuture:
        """Send the call; the future waits for its replies."""
        if method not in self._operations:
            raise AttributeError(f"{self.role}: {method} is not marked with @register")
        operation = self._operations[method]
        dispatch, layout = operation.dispatch, self.layout
        number, parts = (0, None) if batch is None else self._cut(batch, operation)
        requests, shards = {}, {}
        for rank, own in arguments(dispatch, layout, kwargs, parts).items():
            requests[rank] = Request(self.role, method, own, rank in dispatch.answering(layout))
            if batch is not None and parts is not None:
                shards[rank] = Shard(number, len(parts), dispatch.part_of(rank, layout), self.together)
                part = parts[shards[rank].part]
                requests[rank] = self._with_columns(requests[rank], rank, shards[rank], batch, part, operation)
        return RayFuture(self, self._send(method, requests), operation, batch, parts, shards)

    def _cut(self, batch: Batch, operation: Operation) -> tuple[int, Parts]:
        return self.pool.resident.cut(batch, operation.dispatch.parts(self.layout), self.together)

    def _with_columns(
        self, request: Request, rank: int, shard: Shard, batch: Batch, part: Sequence[int], operation: Operation
    ) -> Request:
        """The request with those columns of the rank's part that do not lie there yet."""
        resident, names = self.pool.resident, operation.columns(batch)
        is_new = not resident.knows(rank, shard)
        mine = batch.select(resident.missing(rank, shard, batch, names)).take(part)
        resident.hold(rank, shard, batch, mine.cols)
        resident.forget(rank, shard, operation.writes)
        cu_seqlens = mine.cu_seqlens if is_new else None
        return replace(request, shard=shard, cu_seqlens=cu_seqlens, sent=mine.cols, names=names)

    def _send(self, method: str, requests: dict[int, Request]) -> Call:
        self.pool.check_alive()
        packed = {rank: encode(request) for rank, request in requests.items()}
        refs = {self.pool.processes[rank].execute.remote(data): rank for rank, data in packed.items()}
        return self.pool.cluster.call(self.role, method, refs, sum(map(len, packed.values())))

    def finish(self, call: Call) -> Call:
        """Wait for all replies and count them."""
        self.pool.check_alive()
        self.pool.cluster.drive(call)
        call.count(self.stats)
        return call


class RayFuture:
    """The merged answer of a call, once all ranks have replied."""

    def __init__(
        self,
        group: RayGroup,
        call: Call,
        operation: Operation,
        batch: Batch | None,
        parts: Parts | None,
        shards: dict[int, Shard],
    ):
        self._group, self._call, self._operation = group, call, operation
        self._batch, self._parts, self._shards = batch, parts, shards
        self._merged: list[Any] = []

    def result(self) -> Any:
        """The same object each time. WorkerError where this call, or another one that is going on, has failed."""
        if not self._merged:
            self._merged.append(self._merge(self._group.finish(self._call)))
        return self._merged[0]

    def _merge(self, call: Call) -> Any:
        dispatch = self._operation.dispatch
        merged = dispatch.merge([call.replies[r].value for r in dispatch.answering(self._group.layout)])
        if not self._operation.writes or self._batch is None or self._parts is None:
            return merged
        # In the batch's order and with its own offsets, by which it is known.
        columns = Batch(self._batch.cu_seqlens, merged.take(order(self._parts)).cols)
        for rank, shard in self._shards.items():
            self._group.pool.resident.hold(rank, shard, columns, call.replies[rank].stored)
        return columns
