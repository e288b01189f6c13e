"""Values given in Python, checked by type and range. Each error is one line: the name, what it is, what it must be."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from verl.core.errors import RolloutError


def whole(name: str, value: Any, least: int | None = None) -> int:
    """The value as an int. RolloutError for any other type (a bool, 2.5, 2.0, nan, text, None) and below `least`."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or (least is not None and int(value) < least):
        want = "a whole number" if least is None else f"{least} or more, a whole number"
        raise RolloutError(f"{name}={value!r} must be {want}")
    return int(value)


def real(name: str, value: Any, ok: Callable[[Any], bool], want: str) -> float:
    """The value as a float. RolloutError, which says `want`, where it is no finite number, or not `ok`."""
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int that no float can hold
        number = math.inf
    if not math.isfinite(number) or not ok(number):
        raise RolloutError(f"{name}={value!r} must be {want}")
    return number


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """The value. RolloutError where it is none of `known`."""
    if value not in known:
        raise RolloutError(f"{name}={value!r} must be {', '.join(known[:-1])} or {known[-1]}")
    return str(value)


def token_ids(name: str, ids: Any) -> tuple[int, ...]:
    """The ids as a tuple of ints; whatever counts as an integer is one. RolloutError names the first that is not."""
    if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
        raise RolloutError(f"{name} must be a list of token ids, got {ids!r}")
    out = tuple(ids)
    if set(map(type, out)) <= {int}:
        return out
    return tuple(_index(name, t) for t in out)


def _index(name: str, token: Any) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise RolloutError(f"{name} holds {token!r}; token ids are whole numbers")
    try:
        return int(token.__index__())
    except TypeError as e:  # a tensor of floats has the method and refuses
        raise RolloutError(f"{name} holds {token!r}; token ids are whole numbers") from e
