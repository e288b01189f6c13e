"""When a worker worked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One method of one rank of a role. start, end: seconds of time.time() on the machine where it ran, so spans of
    several machines are as far apart as their clocks.
    """

    role: str
    rank: int
    method: str
    start: float
    end: float
