"""What the slot cache may hold, and who may join those that run. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verl.core import RolloutError
from verl.engines.rollout.memory import GRAIN, bytes_of, rounded
from verl.engines.rollout.sequence import Sequence

_AHEAD = 64
"""A sequence is admitted only where everyone may grow by this many tokens, or it would soon be sent back."""


@dataclass(frozen=True)
class Budget:
    """max_slots: sequences at one time. token_bytes: keys and values of one token, all layers. max_bytes: of all slots
    together, which are as long as the longest of them; None: no limit."""

    max_slots: int
    token_bytes: int
    max_bytes: int | None = None

    @classmethod
    def of(cls, max_slots: int, token_bytes: int, gb: float | None) -> Budget:
        """gb: 10^9 bytes."""
        return cls(max_slots, token_bytes, None if gb is None else bytes_of(gb))

    def fits(self, slots: int, tokens: int) -> bool:
        """Whether there may be `slots` slots of `tokens` tokens each."""
        within = self.max_bytes is None or slots * rounded(tokens) * self.token_bytes <= self.max_bytes
        return slots <= self.max_slots and within

    def tallest(self, slots: int, wanted: int) -> int:
        """Tokens that each of `slots` slots can have, where `wanted` would do."""
        if self.max_bytes is None:
            return rounded(wanted)
        return min(rounded(wanted), self.max_bytes // (slots * self.token_bytes) // GRAIN * GRAIN)

    def check(self, sequence: Sequence) -> None:
        """RolloutError where the sequence could never run to its end, not even alone."""
        needed = rounded(sequence.longest) * self.token_bytes
        if self.max_bytes is not None and needed > self.max_bytes:
            raise RolloutError(
                f"request {sequence.request.id!r}: {len(sequence.request.token_ids)} prompt tokens and up to "
                f"{sequence.room} more need {needed / 1e9} GB of keys and values; raise rollout.kv_cache_gb to that or "
                f"more (it is {self.max_bytes / 1e9}), or lower rollout.max_response_tokens"
            )


class Admission:
    """Takes sequences one by one while the cache with them, and with some growth of all, is within the budget."""

    def __init__(self, budget: Budget, running: Iterable[Sequence]):
        self._budget = budget
        heights = [_height(s) for s in running]
        self._slots, self._tokens = len(heights), max(heights, default=0)

    def admit(self, sequence: Sequence) -> bool:
        """Whether it may join; if so, it counts from now on."""
        tokens = max(self._tokens, _height(sequence))
        if not self._budget.fits(self._slots + 1, tokens):
            return False
        self._slots, self._tokens = self._slots + 1, tokens
        return True


def _height(sequence: Sequence) -> int:
    return min(sequence.longest, sequence.length + _AHEAD)
