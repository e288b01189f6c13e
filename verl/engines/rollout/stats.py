"""What an engine has done since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts that only grow; a step's share is the metric rollout/NAME.

    prefilled_tokens: computed in prefills, again after a preemption; a prompt of several samples counts once.
    reused_tokens: beginnings of prompts that were read from the prefix cache, counted as above.
    preemptions: sequences sent back to the queue because the KV budget was full.
    """

    prefilled_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
