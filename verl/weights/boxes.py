"""Boxes: the part of a tensor that lies between two corners, as one half-open interval a dimension. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]
"""(start, end) of each dimension, end excluded; () is the one element of a scalar."""


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def extents(box: Box) -> tuple[int, ...]:
    """Shape of what the box holds."""
    return tuple(end - start for start, end in box)


def numel(box: Box) -> int:
    """Elements in the box."""
    return prod(end - start for start, end in box)


def intersect(a: Box, b: Box) -> Box | None:
    """What both hold; None where that is nothing. Both are boxes of one tensor."""
    both = []
    for (a_start, a_end), (b_start, b_end) in zip(a, b, strict=True):
        start = a_start if a_start > b_start else b_start
        end = a_end if a_end < b_end else b_end
        if start >= end:
            return None
        both.append((start, end))
    return tuple(both)


def subtract(a: Box, b: Box) -> list[Box]:
    """`a` without `b`, as disjoint boxes: at most two a dimension."""
    both = intersect(a, b)
    if both is None:
        return [a]
    rest = []
    for dim, ((start, end), (cut, cut_end)) in enumerate(zip(a, both, strict=True)):
        # Dimensions before this one are those of the cut, dimensions after it those of `a`.
        if start < cut:
            rest.append((*both[:dim], (start, cut), *a[dim + 1 :]))
        if cut_end < end:
            rest.append((*both[:dim], (cut_end, end), *a[dim + 1 :]))
    return rest


def within(inner: Box, outer: Box) -> bool:
    """Whether `outer` holds all of `inner`."""
    return intersect(inner, outer) == inner


def slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """Index of `box` in a tensor that holds `origin`."""
    return tuple(slice(start - zero, end - zero) for (start, end), (zero, _) in zip(box, origin, strict=True))


def pieces(box: Box, most: int) -> Iterator[Box]:
    """Parts of at most `most` elements (1 or more), in the order of memory; contiguous where the box is."""
    size = numel(box)
    if size <= most:
        yield box
        return
    dim = next(d for d, (start, end) in enumerate(box) if end - start > 1)
    start, end = box[dim]
    step = max(1, most * (end - start) // size)
    for at in range(start, end, step):
        yield from pieces((*box[:dim], (at, min(at + step, end)), *box[dim + 1 :]), most)
