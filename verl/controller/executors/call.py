"""A call that is going on in several processes, and what calls cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.controller.wire import Reply, decode
from verl.core.span import Span


@dataclass
class CallStats:
    """bytes_sent, bytes_received: through the controller; seconds: from a call to its last reply; worker_seconds: of
    these, in the method of the slowest rank. The rest went to the wire, and to waiting for other roles of the pool.
    """

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    worker_seconds: float = 0.0


@dataclass
class Call:
    """pending: what is waited for, and the rank that it comes from; expires: on the clock of time.monotonic; places:
    (node id, address, process id) of each rank.
    """

    role: str
    method: str
    pending: dict[Any, int]
    expires: float
    places: Sequence[tuple[str, str, int]] = ()
    sent: int = 0
    received: int = 0
    replies: dict[int, Reply] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0

    def take(self, ref: Any, data: bytes) -> Reply:
        """One reply, as it came."""
        reply: Reply = decode(data)
        self.replies[self.pending.pop(ref)] = reply
        self.received += len(data)
        self.ended = time.monotonic()
        return reply

    def values(self) -> list[Any]:
        """What the ranks said, in their order."""
        return [self.replies[rank].value for rank in sorted(self.replies)]

    def spans(self) -> list[Span]:
        """When each rank worked for it."""
        return [
            Span(self.role, rank, self.method, reply.start, reply.start + reply.seconds)
            for rank, reply in sorted(self.replies.items())
        ]

    def count(self, stats: CallStats) -> None:
        stats.calls += 1
        stats.bytes_sent += self.sent
        stats.bytes_received += self.received
        stats.seconds += self.ended - self.began
        stats.worker_seconds += max(reply.seconds for reply in self.replies.values())
