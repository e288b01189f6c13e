"""The controller's account of which columns lie on which ranks, so that only what is missing is sent."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from verl.controller.partition import Parts, partition
from verl.controller.wire import Shard
from verl.core.batch import Batch

Held = dict[str, "weakref.ref[Tensor]"]


class Resident:
    """Of the processes of one pool, for one batch at a time.

    A batch is known by its cu_seqlens object and a column by its tensor object, so that one that was replaced is sent
    again. (A column that is changed in place is not seen; nothing does so.)
    """

    def __init__(self) -> None:
        self._number = 0
        self._batch: weakref.ref[Tensor] | None = None
        self._parts: dict[tuple[int, bool], list[list[int]]] = {}
        self._held: dict[tuple[int, Shard], Held] = {}

    def cut(self, batch: Batch, parts: int, together: bool) -> tuple[int, Parts]:
        """Number of the batch, and which sequences form each part. A batch that is new takes the place of the last."""
        if self._batch is None or self._batch() is not batch.cu_seqlens:
            self._number += 1
            self._batch = weakref.ref(batch.cu_seqlens)
            self._parts.clear()
            self._held.clear()
        key = (parts, together)
        if key not in self._parts:
            groups = batch["group_id"].tolist() if together and "group_id" in batch else None
            self._parts[key] = partition(batch.lengths.tolist(), parts, groups)
        return self._number, self._parts[key]

    def knows(self, rank: int, shard: Shard) -> bool:
        return (rank, shard) in self._held

    def missing(self, rank: int, shard: Shard, batch: Batch, names: Iterable[str]) -> list[str]:
        """Columns among `names` that the rank has not, or has of an older tensor."""
        held = self._held.get((rank, shard), {})
        return [name for name in names if name not in held or held[name]() is not batch[name]]

    def hold(self, rank: int, shard: Shard, batch: Batch, names: Iterable[str]) -> None:
        """The rank has these columns of `batch`. Nothing is noted of a batch that is no longer the current one."""
        if shard.batch == self._number:
            self._held.setdefault((rank, shard), {}).update({n: weakref.ref(batch[n]) for n in names})

    def forget(self, rank: int, shard: Shard, names: Iterable[str]) -> None:
        """The rank is about to write these columns anew."""
        held = self._held.get((rank, shard), {})
        for name in names:
            held.pop(name, None)
