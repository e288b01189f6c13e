"""Carrying out a plan over torch.distributed: gloo between processors, NCCL between GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from verl.core.errors import WeightsError
from verl.weights.boxes import extents, numel, slices, within
from verl.weights.route import Message, Piece, Round, Route
from verl.weights.traffic import Traffic
from verl.weights.waiting import Deadline

DEADLINE_SECONDS = 300.0


class Transport:
    """Moves the shards of one rank from the layout that trains to the one that generates. All ranks call it together.

    group: of ranks 0 .. world - 1 as the plan numbers them; None: all processes. device: where tensors live.
    deadline_seconds: of every round; a rank that is later than that is an error on those that wait for it.
    traffic: of the last `stream`.
    """

    def __init__(
        self,
        route: Route,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        deadline_seconds: float = DEADLINE_SECONDS,
    ):
        self.route, self.group, self.device = route, group, torch.device(device)
        self.deadline_seconds = deadline_seconds
        self.traffic = Traffic()
        if dist.get_rank(group) != route.rank:
            raise WeightsError(f"the route is of rank {route.rank}, but this process is rank {dist.get_rank(group)}")
        # NCCL wants every rank of a group in its first call; later ones are only between those that have messages.
        barrier = dist.barrier(group, async_op=True)
        self._deadline().wait(barrier, f"rank {route.rank} at the first meeting of all ranks")

    def names(self) -> set[str]:
        """Names of the shards that this rank generates with."""
        return set(self.route.wants)

    def collect(self, have: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All of `stream` at once."""
        return dict(self.stream(have))

    def stream(self, have: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, shard) of what this rank generates with, each as soon as it is complete. have: name -> training shard.

        A shard that lies within the training shard is a view of it; others are new and contiguous. Training shards must
        not change until the last one came. WeightsError: `have` is not what the layout says, or a peer is late.
        """
        self.route.check(have)
        self.traffic = Traffic()
        inbox = _Inbox(self.route, have, self.device, self.traffic)
        yield from inbox.local()
        for step in self.route.rounds:
            self._exchange(step, have, inbox)
            yield from inbox.complete()

    def _exchange(self, step: Round, have: Mapping[str, Tensor], inbox: _Inbox) -> None:
        deadline, ops, waits = self._deadline(), [], []
        arriving, borrowed = [], 0
        for message in step.receives:
            buffer, own = inbox.buffer(message)
            borrowed += own
            arriving.append((message, buffer))
            ops.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=message.peer))
            waits.append(f"rank {self.route.rank}: {message.nbytes:,} bytes from rank {message.peer}")
        for message in step.sends:
            buffer, own = self._packed(message, have)
            borrowed += own
            ops.append(dist.P2POp(dist.isend, buffer, group=self.group, group_peer=message.peer))
            waits.append(f"rank {self.route.rank}: {message.nbytes:,} bytes to rank {message.peer}")
        works = dist.batch_isend_irecv(ops)
        if len(works) != len(ops):  # the backend made one of all
            waits = ["; ".join(waits)] * len(works)
        for work, what in zip(works, waits, strict=True):
            deadline.wait(work, what)
        for message, buffer in arriving:
            inbox.unpack(message, buffer)
        self.traffic.sent += sum(message.nbytes for message in step.sends)
        self.traffic.received += sum(message.nbytes for message in step.receives)
        self.traffic.give_back(borrowed)

    def _packed(self, message: Message, have: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """(bytes to send, how many of them are new memory): one contiguous piece goes from where it lies."""
        parts = [_part(have[piece.name], self.route, piece) for piece in message.pieces]
        if len(parts) == 1 and parts[0].is_contiguous():
            return _flat(parts[0]), 0
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=self.device)
        self.traffic.borrow(message.nbytes)
        for part, place in zip(parts, _places(buffer, message, self.route), strict=True):
            place.copy_(part)
        return buffer, message.nbytes

    def _deadline(self) -> Deadline:
        return Deadline(self.deadline_seconds, on_device=self.device.type != "cpu")


@dataclass
class _Inbox:
    """Destination shards: made when their first piece is to come, handed out when the last one came."""

    route: Route
    have: Mapping[str, Tensor]
    device: torch.device
    traffic: Traffic
    made: dict[str, Tensor] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)

    def local(self) -> Iterator[tuple[str, Tensor]]:
        """Shards that lie within a training shard: no bytes, no memory."""
        for name, box in self.route.wants.items():
            held = self.route.holds.get(name)
            if held is not None and within(box, held):
                self.traffic.kept += self.route.nbytes(name, box)
                yield name, self.have[name].detach()[slices(box, held)]

    def complete(self) -> Iterator[tuple[str, Tensor]]:
        """Shards that have all of their pieces. The receiver decides how long they live: none is kept here."""
        for name in [name for name, elements in self.missing.items() if not elements]:
            del self.missing[name]
            self.traffic.hand_over(self.route.nbytes(name, self.route.wants[name]))
            yield name, self.made.pop(name)

    def buffer(self, message: Message) -> tuple[Tensor, int]:
        """(where a message arrives, how many bytes of that are new memory): one contiguous piece arrives in place."""
        parts = [self._place(piece) for piece in message.pieces]
        if len(parts) == 1 and parts[0].is_contiguous():
            return _flat(parts[0]), 0
        self.traffic.borrow(message.nbytes)
        return torch.empty(message.nbytes, dtype=torch.uint8, device=self.device), message.nbytes

    def unpack(self, message: Message, buffer: Tensor) -> None:
        parts = [self._place(piece) for piece in message.pieces]
        if len(parts) > 1 or not parts[0].is_contiguous():
            for part, place in zip(parts, _places(buffer, message, self.route), strict=True):
                part.copy_(place)
        for piece in message.pieces:
            self.missing[piece.name] -= numel(piece.box)

    def _place(self, piece: Piece) -> Tensor:
        name, box = piece.name, self.route.wants[piece.name]
        if name not in self.made:
            self._make(name)
        return self.made[name][slices(piece.box, box)]

    def _make(self, name: str) -> None:
        """A new destination tensor, with what this rank held of it."""
        box, kept = self.route.wants[name], self.route.kept.get(name)
        self.made[name] = torch.empty(extents(box), dtype=self.route.dtypes[name], device=self.device)
        self.missing[name] = numel(box)
        self.traffic.make(self.route.nbytes(name, box))
        if kept is not None:
            own = self.have[name].detach()[slices(kept, self.route.holds[name])]
            self.made[name][slices(kept, box)] = own
            self.missing[name] -= numel(kept)
            self.traffic.kept += self.route.nbytes(name, kept)


def _part(held: Tensor, route: Route, piece: Piece) -> Tensor:
    return held.detach()[slices(piece.box, route.holds[piece.name])]


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in place."""
    return tensor.reshape(-1).view(torch.uint8)


def _places(buffer: Tensor, message: Message, route: Route) -> Iterator[Tensor]:
    """The pieces of a message as they lie in its buffer."""
    start = 0
    for piece in message.pieces:
        shape = extents(piece.box)
        end = start + math.prod(shape) * route.dtypes[piece.name].itemsize
        yield buffer[start:end].view(route.dtypes[piece.name]).view(shape)
        start = end
