"""Rewards that both trainers compute alike. Standard library only: the peer imports it too."""

from __future__ import annotations

from collections.abc import Sequence

VOWELS = frozenset("aeiouAEIOU")


def vowels(response: str) -> float:
    """Share of vowels: costs nothing, and differs between samples, so that every group has an advantage."""
    return sum(c in VOWELS for c in response) / max(1, len(response))


def exact(response: str, answer: str) -> float:
    """1 where the response is the answer, white space at the ends aside."""
    return float(response.strip() == answer)


def verl_vowels(prompts: list[str], responses: list[str]) -> Sequence[float]:
    """`vowels` as a reward function of verl's."""
    return [vowels(r) for r in responses]
