"""A pipeline of stages over micro-batches of different lengths: one forward, one backward by turns.

The schedule is the non-interleaved 1F1B of PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503, 2104.04473): a
stage runs ahead by as many forwards as there are stages behind it, then alternates, so that no more micro-batches than
that are kept. What a stage sends and what it gets from the same neighbour go out together, or both could wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl.parallel.axes import PipelineParallel

Shape = tuple[int, ...]
Forward = Callable[[int, Tensor | None], Tensor]
"""(number of a micro-batch, hidden states from the stage before or None in the first) -> hidden states for the next
stage, or in the last one what is wanted: a loss (a scalar) or any result."""


class Pipeline:
    """One stage's side of it. dtype, device: of hidden states. Every stage calls the same methods with as many
    micro-batches of the same shapes.
    """

    def __init__(self, axis: PipelineParallel, dtype: torch.dtype, device: torch.device | str):
        self.axis, self.dtype, self.device = axis, dtype, device

    def forward_backward(self, shapes: Sequence[Shape], forward: Forward) -> list[Tensor]:
        """Add the gradients of all micro-batches; their losses in the last stage, [] in the others.

        shapes: of the hidden states of each micro-batch.
        """
        axis, count = self.axis, len(shapes)
        ahead = min(axis.size - axis.rank - 1, count)
        open_: deque[tuple[Tensor | None, Tensor]] = deque()
        losses = []

        def run(number: int, hidden: Tensor | None) -> Tensor:
            out = forward(number, hidden)
            open_.append((hidden, out))
            if axis.last:
                losses.append(out.detach())
            return out

        for i in range(ahead):
            self._next(run(i, self._previous(None, shapes[i])), None)
        hidden = self._previous(None, shapes[ahead]) if ahead < count else None
        for i in range(ahead, count):
            grad = self._next(run(i, hidden), shapes[i - ahead])
            back = _backward(*open_.popleft(), grad)
            hidden = self._previous(back, shapes[i + 1] if i + 1 < count else None)
        for i in range(count - ahead, count):
            self._previous(_backward(*open_.popleft(), self._next(None, shapes[i])), None)
        return losses

    @torch.no_grad()
    def infer(self, shapes: Sequence[Shape], forward: Forward) -> list[Tensor]:
        """The last stage's results, without a gradient; [] in the others."""
        results = []
        for i, shape in enumerate(shapes):
            out = forward(i, self._previous(None, shape))
            if self.axis.last:
                results.append(out)
            else:
                self._next(out, None)
        return results

    def from_last(self, x: Tensor) -> Tensor:
        """The last stage's `x` in all stages, written into theirs."""
        dist.broadcast(x, group=self.axis.group, group_src=self.axis.size - 1)
        return x

    @torch.no_grad()
    def sum_ends(self, x: Tensor) -> None:
        """x, in place, is the sum of what the first and the last stage have; nothing happens in others.

        For the gradient of a weight that both hold: a tied embedding.
        """
        if self.axis.first or self.axis.last:
            other = torch.empty_like(x, memory_format=torch.contiguous_format)
            peer = self.axis.size - 1 if self.axis.first else 0
            self._exchange(x.contiguous(), other, peer)
            x.add_(other)

    def _previous(self, grad: Tensor | None, shape: Shape | None) -> Tensor | None:
        """Give a gradient to the stage before and get hidden states of `shape` from it."""
        hidden = None if self.axis.first else self._swap(grad, shape, self.axis.rank - 1)
        return None if hidden is None else hidden.requires_grad_(torch.is_grad_enabled())

    def _next(self, hidden: Tensor | None, shape: Shape | None) -> Tensor | None:
        """Give hidden states to the next stage and get a gradient of `shape` from it."""
        return None if self.axis.last else self._swap(hidden, shape, self.axis.rank + 1)

    def _swap(self, out: Tensor | None, shape: Shape | None, peer: int) -> Tensor | None:
        into = None if shape is None else torch.empty(shape, dtype=self.dtype, device=self.device)
        self._exchange(None if out is None else out.detach().contiguous(), into, peer)
        return into

    def _exchange(self, out: Tensor | None, into: Tensor | None, peer: int) -> None:
        pairs = ((dist.isend, out), (dist.irecv, into))
        ops = [dist.P2POp(op, x, group=self.axis.group, group_peer=peer) for op, x in pairs if x is not None]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def _backward(hidden: Tensor | None, out: Tensor, grad: Tensor | None) -> Tensor | None:
    """Gradient of `hidden` after the backward of `out`; grad: of `out`, None for a loss."""
    if out.requires_grad:
        out.backward(grad)
    if hidden is None:
        return None
    return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
