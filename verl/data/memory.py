"""Data that was given in memory: as a jsonl file, which is read like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.core import DataError
from verl.data.rows import Row


def write_jsonl(dataset: Any, path: Path, key: str) -> None:
    """One row a line. dataset: a datasets.Dataset, a list of rows, or a list of texts; DataError begins with `key`."""
    with open(path, "w", encoding="utf-8") as file:
        for number, row in enumerate(_rows(dataset, key)):
            file.write(_line(row, f"{key}, row {number}") + "\n")


def _rows(dataset: Any, key: str) -> Iterator[Row]:
    # A table is told by its columns: nothing else that can be walked through gives rows for certain.
    if not isinstance(dataset, (list, tuple)) and not _is_table(dataset):
        raise DataError(
            f"{key}: cannot train on a {type(dataset).__name__}; give a name or path, a datasets.Dataset (of a "
            "DatasetDict one split), or a list of rows or of prompts"
        )
    if not len(dataset):
        raise DataError(f"{key}: the data set is empty")
    kind = str if isinstance(dataset[0], str) else Mapping
    for number, row in enumerate(dataset):
        if not isinstance(row, kind):
            wanted = "text, as row 0 is" if kind is str else "a dict of named columns"
            raise DataError(f"{key}, row {number}: must be {wanted}, found {row!r:.60}")
        yield {"prompt": row} if isinstance(row, str) else row


def _is_table(dataset: Any) -> bool:
    return isinstance(getattr(dataset, "column_names", None), list) and hasattr(dataset, "__len__")


def _line(row: Row, where: str) -> str:
    for column, value in row.items():
        if not (isinstance(column, str) and _text_keys(value)):
            raise DataError(f"{where}: column {column!r} has keys that are not text; write them as text")
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as e:
            raise DataError(f"{where}: column {column!r} cannot be written as JSON ({e}); leave it out") from e
    return json.dumps(dict(row))


def _text_keys(value: Any) -> bool:
    """JSON would turn a key that is a number into text, without a word."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _text_keys(item) for key, item in value.items())
    return all(map(_text_keys, value)) if isinstance(value, (list, tuple)) else True
