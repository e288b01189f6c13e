"""What moving weights cost one rank, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Counted as it happens; all in bytes, of one publish on one rank.

    sent, received: payload between ranks. kept: read from own memory (viewed, or copied into a new tensor).
    made: of new destination tensors. open: of those that are not handed out yet. buffers: of messages and gathered
    parameters at this moment.
    peak: highest of made + buffers: memory beyond the training shards where the receiver keeps what it is given.
    streamed_peak: the same where the receiver copies each shard and lets go of it.
    """

    sent: int = 0
    received: int = 0
    kept: int = 0
    made: int = 0
    buffers: int = 0
    open: int = 0
    peak: int = 0
    streamed_peak: int = 0

    def make(self, nbytes: int) -> None:
        """A destination tensor is allocated."""
        self.made += nbytes
        self.open += nbytes
        self._mark()

    def hand_over(self, nbytes: int) -> None:
        """A destination tensor that was allocated goes to the receiver."""
        self.open -= nbytes

    def borrow(self, nbytes: int) -> None:
        """A buffer is allocated."""
        self.buffers += nbytes
        self._mark()

    def give_back(self, nbytes: int) -> None:
        """A buffer is freed."""
        self.buffers -= nbytes

    def _mark(self) -> None:
        self.peak = max(self.peak, self.made + self.buffers)
        self.streamed_peak = max(self.streamed_peak, self.open + self.buffers)
