"""The far side of a call: a process that holds workers by role, and the columns that lie there."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from verl.controller.rank import Make, Rank
from verl.controller.wire import Reply, Request, Shard, decode, encode
from verl.controller.worker import Operation, Worker
from verl.core.batch import Batch
from verl.core.outside import describe


class Host:
    """Workers of one process. A rank that is called for several roles runs them one after the other."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._workers: dict[str, Worker] = {}
        self._resident: dict[Shard, Batch] = {}
        self._store: dist.Store | None = None

    def open_store(self, host: str) -> int:
        """On rank 0: start the store at which all processes meet; its port."""
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._store = store
        return int(store.port)

    def join(self, rank: Rank, backend: str, seconds: float) -> None:
        """Make the default process group. A collective that waits longer than `seconds` for a peer raises."""
        limit = timedelta(seconds=seconds)
        store = self._store or dist.TCPStore(*rank.master, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world, timeout=limit)

    def add(self, role: str, make: bytes, rank: Rank) -> dict[str, Operation]:
        """Make the worker of a role; its operations."""
        factory: Make = decode(make)
        self._workers[role] = factory(rank)
        return self._workers[role].operations()

    def setup(self, method: str, *args: Any) -> bytes:
        """Run one of the methods above; what it returns, or raises, is in the reply."""
        with _Attempt() as attempt:
            attempt.reply = Reply(getattr(self, method)(*args))
        return encode(attempt.reply)

    def execute(self, data: bytes) -> bytes:
        """Run one request; whatever it raises is in the reply."""
        with _Attempt() as attempt:
            attempt.reply = self._run(decode(data))
        return encode(attempt.reply)

    def _run(self, request: Request) -> Reply:
        worker, kwargs = self._workers[request.role], request.kwargs
        fn = getattr(worker, request.method)
        if request.shard is None:
            value = fn(**kwargs)
        else:
            value = fn(self._lay(request, request.shard).select(request.names), **kwargs)
        stored = self._keep(request, value)
        if request.answers and (operation := worker.operations().get(request.method)) is not None:
            operation.check(request.method, value)
        return Reply(value if request.answers else None, stored=stored)

    def _lay(self, request: Request, shard: Shard) -> Batch:
        """The shard with what was sent added. Columns of an earlier batch go."""
        if any(other.batch != shard.batch for other in self._resident):
            self._resident.clear()
        if shard not in self._resident:
            assert request.cu_seqlens is not None, f"{shard} is not here"
            self._resident[shard] = Batch(request.cu_seqlens, {})
        self._resident[shard] = self._resident[shard].with_(**(request.sent or {}))
        return self._resident[shard]

    def _keep(self, request: Request, value: Any) -> tuple[str, ...]:
        """What a method made of its shard stays here for the next one."""
        if request.shard is None or not isinstance(value, Batch):
            return ()
        self._resident[request.shard] = self._resident[request.shard].merge(value)
        return tuple(value.cols)


class _Attempt:
    """`with _Attempt() as attempt: attempt.reply = ...`; `reply` then has its times, or what the block raised.

    No exception of outside code crosses the wire: its class may be unknown on the other side.
    """

    reply: Reply

    def __enter__(self) -> _Attempt:
        self._start, self._began = time.perf_counter(), time.time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        caught = isinstance(error, Exception | SystemExit)  # a script of the user's may exit
        if error is not None and caught:
            text = "".join(traceback.format_exception(kind, error, trace))
            self.reply = Reply(error=describe(error), traceback=text)
        if error is None or caught:
            self.reply = replace(self.reply, start=self._began, seconds=time.perf_counter() - self._start)
        return caught
