"""How several prompts become one packed forward: what their beginnings have in common is computed once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.models.plan import Block

Tokens = tuple[int, ...]
_WORTH = 8
"""Shortest common beginning that is shared (a chat template's system prompt is 15 tokens or more)."""


@dataclass(frozen=True)
class Write:
    """Packed tokens [start, stop) go to these slots of the cache, from token `at` on."""

    start: int
    stop: int
    slots: slice
    at: int


@dataclass(frozen=True)
class Part:
    """Packed tokens [start, stop) go on from the first `at` tokens that this slot holds already."""

    start: int
    stop: int
    slot: int
    at: int


@dataclass(frozen=True)
class PrefillPlan:
    """token_ids, positions [P] of the packed input: blocks first, then parts; where its keys go; where each prompt's
    last token is, in the order in which they were added."""

    token_ids: list[int]
    positions: list[int]
    blocks: list[Block]
    writes: list[Write]
    last: list[int]
    parts: list[Part] = field(default_factory=list)

    def add_part(self, tokens: Tokens, slots: slice, at: int) -> None:
        """Tokens that follow the `at` ones which each of the slots holds, the same in all."""
        start = len(self.token_ids)
        _add_tokens(self, tokens, slots, at)
        self.parts.append(Part(start, len(self.token_ids), slots.start, at))
        self.last.append(len(self.token_ids) - 1)


def plan_prefill(prompts: Sequence[Tokens], slots: Sequence[slice]) -> PrefillPlan:
    """Pack prompts; slots[i] are the cache slots that prompt i fills, in rising order. Others may lie in between."""
    plan = PrefillPlan([], [], [], [], [])
    first = 0
    for size, shared in _blocks(prompts, slots):
        _add_block(plan, prompts[first : first + size], slots[first : first + size], shared)
        first += size
    return plan


def _add_block(plan: PrefillPlan, prompts: Sequence[Tokens], slots: Sequence[slice], shared: int) -> None:
    start = len(plan.token_ids)
    _add_tokens(plan, prompts[0][:shared], slice(slots[0].start, slots[-1].stop), 0)
    for prompt, where in zip(prompts, slots, strict=True):
        if len(prompt) > shared:
            _add_tokens(plan, prompt[shared:], where, shared)
        plan.last.append(len(plan.token_ids) - 1)
    branches = tuple(len(p) - shared for p in prompts) if len(prompts) > 1 else ()
    plan.blocks.append(Block(start, shared, branches))


def _add_tokens(plan: PrefillPlan, tokens: Tokens, slots: slice, at: int) -> None:
    start = len(plan.token_ids)
    plan.token_ids.extend(tokens)
    plan.positions.extend(range(at, at + len(tokens)))
    plan.writes.append(Write(start, start + len(tokens), slots, at))


def _blocks(prompts: Sequence[Tokens], slots: Sequence[slice]) -> list[tuple[int, int]]:
    """(number of prompts, tokens they share) of runs of neighbours; a prompt joins a run where that saves more."""
    runs: list[tuple[int, int]] = []
    head: Tokens = ()
    for i, prompt in enumerate(prompts):
        size, shared = runs[-1] if runs else (0, 0)
        # A prompt keeps its last token to itself: its features are the ones the first draw needs.
        common = min(_common(head[:shared], prompt), len(prompt) - 1, len(head) - 1)
        # What a run shares is written to its slots in one go, so there must be no other's between them.
        joined = i > 0 and slots[i - 1].stop == slots[i].start
        if joined and common >= _WORTH and size * common >= (size - 1) * shared:
            runs[-1] = (size + 1, common)
        else:
            runs.append((1, len(prompt)))
            head = prompt
    return runs


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
