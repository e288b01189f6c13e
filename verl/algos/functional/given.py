"""Checks of what a caller gave: each is a ValueError of one line, that starts with the function and the argument."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor


def tensor(where: str, x: Any) -> None:
    """A torch tensor of real numbers."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{where} must be a torch tensor, got {'None' if x is None else type(x).__name__}")
    if x.is_complex():
        raise ValueError(f"{where} must hold real numbers, got {x.dtype}")


def zeros_and_ones(where: str, mask: Any) -> None:
    """A mask: a tensor of bool, or of 0 and 1."""
    tensor(where, mask)
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{where} must hold 0 and 1 only (or be bool), got other values")


def together(where: str, x: Tensor, what: str, other: Tensor) -> None:
    """On the device of the other tensor, whose name is `what`."""
    if x.device != other.device:
        raise ValueError(f"{where} is on {x.device}, {what} on {other.device}; move them together")


def computed_in(*columns: Tensor) -> torch.dtype:
    """float64 where a column is; float32 for all that is narrower, whatever its type."""
    return torch.float64 if any(x.dtype == torch.float64 for x in columns) else torch.float32


def word(where: str, x: Any) -> None:
    """A name."""
    if not isinstance(x, str):
        raise ValueError(f"{where} must be a string, got {shown(x)}")


def above_zero(where: str, x: Any) -> float:
    """A finite number above 0, as a float."""
    number = float(x) if isinstance(x, (np.integer, np.floating)) else x
    if not isinstance(number, (int, float)) or isinstance(x, bool) or not 0 < number <= sys.float_info.max:
        raise ValueError(f"{where} must be a finite number above 0, got {shown(x)}")
    return float(number)


def count(where: str, x: Any) -> int:
    """A whole number of at least 1, as an int."""
    if not isinstance(x, (int, np.integer)) or isinstance(x, bool) or x < 1:
        raise ValueError(f"{where} must be a whole number, at least 1, got {shown(x)}")
    return int(x)


def shown(x: Any) -> str:
    """A value for a message of one line; its type where it is long."""
    text = repr(x)
    return text if len(text) <= 60 and "\n" not in text else f"a value of type {type(x).__name__}"
