"""Sequences as trees: a beginning that several of them have in common is one node. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor, int8

_WORTH = 8
"""Shortest common beginning of different prompts that is shared."""
_GAIN = 0.1
"""It must spare at least this share of their tokens: less does not pay for attention in more and masked parts."""


@dataclass(frozen=True)
class Span:
    """Input tokens [start, stop) of the batch: one sequence, whose first `prompt` tokens come before its first sampled
    one. rows: batch indices of the tokens that are asked about."""

    start: int
    stop: int
    prompt: int
    rows: Tensor


@dataclass(frozen=True)
class Node:
    """`size` tokens that follow those of the nodes above. source: batch index of the first; at: its position in the
    sequence. spans: the sequences that end here."""

    source: int
    at: int
    size: int
    spans: tuple[Span, ...] = ()
    children: tuple[Node, ...] = ()


def forest(spans: Sequence[Span], ids: Tensor) -> list[Node]:
    """Trees of sequences over the tokens `ids` of a batch, all in order of first appearance.

    One prompt is one node, however short. Different prompts share a beginning of _WORTH tokens or more where that
    spares enough, and so do some of these below it. Responses are shared only where two of a prompt are the same.
    """
    prompts: dict[Hashable, list[Span]] = {}
    for number, span in enumerate(spans):
        key: Hashable = _bytes(ids, span.start, span.prompt) if span.prompt else number
        prompts.setdefault(key, []).append(span)
    return _grow(list(prompts.values()), ids, 0, 0)


def _grow(prompts: list[list[Span]], ids: Tensor, above: int, known: int) -> list[Node]:
    """Nodes of prompts that agree in `known` tokens, of which the first `above` have a node already."""
    alike: dict[Hashable, list[list[Span]]] = {}
    for number, spans in enumerate(prompts):
        left = spans[0].prompt - known
        key: Hashable = _bytes(ids, spans[0].start + known, _WORTH) if left >= _WORTH else number
        alike.setdefault(key, []).append(spans)
    nodes: list[Node] = []
    for some in alike.values():
        if len(some) == 1:
            nodes.append(_prompt(some[0], ids, above))
            continue
        common = _common([spans[0] for spans in some], ids)
        spared = (len(some) - 1) * (common - above)
        if spared >= _GAIN * sum(_size(spans) - above for spans in some):
            below = tuple(_grow(some, ids, common, common))
            nodes.append(Node(some[0][0].start + above, above, common - above, children=below))
        else:
            nodes += _grow(some, ids, above, common)
    return nodes


def _prompt(spans: list[Span], ids: Tensor, above: int) -> Node:
    """What is left of one prompt, and its branches; a single one goes on in the prompt's own node."""
    first = spans[0]
    ends: dict[bytes, list[Span]] = {}
    for span in spans:
        ends.setdefault(_bytes(ids, span.start + span.prompt, span.stop - span.start - span.prompt), []).append(span)
    if len(ends) == 1:
        return Node(first.start + above, above, first.stop - first.start - above, tuple(spans))
    leaves = [
        Node(same[0].start + first.prompt, first.prompt, same[0].stop - same[0].start - first.prompt, tuple(same))
        for same in ends.values()
    ]
    return Node(first.start + above, above, first.prompt - above, children=tuple(leaves))


def _size(spans: list[Span]) -> int:
    """Tokens of a prompt and all its branches."""
    return spans[0].prompt + sum(s.stop - s.start - s.prompt for s in spans)


def _common(spans: list[Span], ids: Tensor) -> int:
    """Length of the beginning that all these prompts have in common."""
    first, length = spans[0], min(s.prompt for s in spans)
    for span in spans[1:]:
        differ = ids[span.start : span.start + length] != ids[first.start : first.start + length]
        length = int(differ.to(int8).argmax()) if bool(differ.any()) else length
    return length


def _bytes(ids: Tensor, start: int, size: int) -> bytes:
    return ids[start : start + size].numpy().tobytes()
