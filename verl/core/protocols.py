"""The seams: what a backend must offer. Each Protocol has at most nine members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from verl.core.generation import Completion, GenRequest

if TYPE_CHECKING:
    from torch import Tensor

    from verl.core.batch import Batch
    from verl.core.metrics import Metrics

Place = Literal["device", "host", "released"]
RewardFn = Callable[[list[str], list[str]], Sequence[float]]
"""(prompts, responses) -> one finite number a response."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Generation. Requests go in by `submit` and come back from `poll` as they finish, in any order."""

    version: int
    """Weight version that the next token will be drawn from."""

    def submit(self, requests: Sequence[GenRequest]) -> None:
        """Queue requests. Those of one group_id should arrive together, so that they share the prefill."""

    def poll(self) -> list[Completion]:
        """Advance by one scheduling step and return what finished in it; [] when nothing did or nothing is queued."""

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Stop requests; what they have so far comes back with finish `abort`."""

    def wanted(self) -> Sequence[str]:
        """Names of the weights to send before a commit; empty for an engine that reads the trainer's storage."""

    def receive(self, name: str, tensor: Tensor) -> None:
        """Take one named weight of the next version."""

    def commit(self, version: int) -> None:
        """Make what was received (or changed in shared storage) current; drop every cache of the old version."""

    def place(self, where: Place) -> None:
        """`released` gives the KV cache back while training; `device` takes it again."""

    def counts(self) -> Mapping[str, int]:
        """What it has counted since it was made; numbers only grow. A step's share is logged as `rollout/NAME`."""


class TrainEngine(Protocol):
    """One trainable model with its optimizer, on this rank."""

    def infer(self, batch: Batch) -> Tensor:
        """[T] what the model says of each token (log-prob or value), no gradient; 0 where loss_mask is 0."""

    def forward_backward(self, batch: Batch, loss: TokenLoss) -> Metrics:
        """Accumulate gradients of the summed, weighted token losses of one mini-batch."""

    def optim_step(self) -> Metrics:
        """Clip, check that all is finite, step, advance the schedule, zero the gradients."""

    def shards(self) -> Mapping[str, Tensor]:
        """Named weights as they lie here: what a publisher sends."""

    def place(self, where: Place) -> None:
        """Move training state out of and back into device memory."""

    def pieces(self) -> Mapping[str, Any]:
        """The tensors that the next step depends on, each with the part of the whole that lies here."""

    def load(self, counters: Mapping[str, int], read: Callable[[Mapping[str, Any]], None]) -> None:
        """Restore all that the next step depends on, or raise. read: fills the tensors of `pieces`."""


TokenLoss = Callable[..., Any]
"""(Outputs, Batch) -> (per-token loss [B] unreduced, Metrics)."""
