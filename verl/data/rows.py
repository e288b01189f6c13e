"""What every kind of source gives: rows by column name, and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.core import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """Rows as read. `name` is what the user wrote, with the files or the split that were chosen."""

    name: str
    rows: list[Row]

    @property
    def columns(self) -> list[str]:
        """Every column that some row has, in order of first appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))


def cell(row: Row, column: str) -> Any:
    """The value of a column, or a DataError that names it."""
    if column not in row:
        raise DataError(f"column {column!r} is missing; this row has: {', '.join(map(str, row))}")
    return row[column]


def text_cell(row: Row, column: str) -> str:
    """The value of a text column. Numbers are written as text; anything else is refused."""
    value = cell(row, column)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"column {column!r} must hold text, found {value!r:.60}")
    return str(value)


def one_line(error: BaseException) -> str:
    """First line of an exception's message, or its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
