"""What a reward source returned, checked: one finite number for each response."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from verl.core import RewardError


def checked_values(returned: Any, count: int, name: str) -> list[float]:
    """`returned` as `count` floats, or a RewardError that says what `name` did wrong, and in which row.

    Lists and tuples, and one-dimensional arrays and tensors (anything with `ndim` and `tolist`), are taken. True is 1.
    """
    if hasattr(returned, "tolist") and hasattr(returned, "ndim"):
        if returned.ndim != 1:
            raise RewardError(
                f"{name}: returned shape {tuple(returned.shape)}; return one number a response, shape ({count},)"
            )
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise RewardError(f"{name}: returned {_type(returned)}; return a list of {count} numbers, one a response")
    if len(returned) != count:
        raise RewardError(
            f"{name}: returned {len(returned)} values for {count} responses; return one a response, in order"
        )
    return [checked_value(value, row, name) for row, value in enumerate(returned)]


def checked_value(value: Any, row: int, name: str) -> float:
    """One finite float, or a RewardError that names the source, the row and the value."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise RewardError(f"{name}: row {row}: {value!r:.60} is {_type(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{name}: row {row}: {value!r:.60} is not a finite number")
    return number


def _type(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
