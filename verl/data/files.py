"""Local files: parquet, jsonl, json, csv, each also compressed as .gz except parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from verl.core import DataError
from verl.data.rows import Row, Rows, one_line

LARGEST_CELL = 1 << 30


def read_file(path: Path, limit: int | None = None) -> Iterator[Row]:
    """Rows of one file in its order, at most `limit`. The ending of the name decides how it is read."""
    reader = READERS[data_suffix(path)]
    try:
        yield from islice(reader(path), limit)
    except UnicodeDecodeError as e:
        raise DataError(
            f"{path}: not UTF-8 text (byte {e.start}); convert it, or rename it if it is another format"
        ) from e
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path}: cannot be read ({one_line(e)})") from e


def read_files(name: str, paths: list[Path], limit: int | None = None) -> Rows:
    """Rows of several files, one after the other, at most `limit` in all."""
    rows: list[Row] = []
    for path in paths:
        left = None if limit is None else limit - len(rows)
        if left == 0:
            break
        rows += read_file(path, left)
    return Rows(name, rows)


def data_suffix(path: Path) -> str:
    """`.jsonl` of `a.jsonl` and of `a.jsonl.gz`; empty for a name that is no data file."""
    name = path.name.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    return suffix if suffix in READERS and not (suffix == ".parquet" and name != path.name.lower()) else ""


def _text(path: Path) -> TextIO:
    if path.suffix.lower() == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _object(path: Path, where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{path}, {where}: expected an object {{...}} with named columns, found a {type(value).__name__}"
        )
    return value


def _parse(text: str) -> Any:
    """JSON, with halves of surrogate pairs (`"\\ud83d"`), which no tokenizer reads and no file takes, as U+FFFD."""
    value = json.loads(text)
    if "\\ud" not in text and "\\uD" not in text:
        return value
    whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(whole)


def read_jsonl(path: Path) -> Iterator[Row]:
    """One object a line; blank lines are skipped."""
    with _text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = _parse(line)
            except (json.JSONDecodeError, RecursionError) as e:
                raise DataError(f"{path}, line {number}: not valid JSON ({one_line(e)})") from e
            yield _object(path, f"line {number}", value)


def read_json(path: Path) -> Iterator[Row]:
    """A list of objects, or an object with exactly one list of objects in it (`{"data": [...]}`)."""
    with _text(path) as file:
        try:
            value = _parse(file.read())
        except json.JSONDecodeError as e:
            raise DataError(f"{path}, line {e.lineno}: not valid JSON ({e.msg}); one object a line is .jsonl") from e
        except RecursionError as e:
            raise DataError(f"{path}: not usable JSON ({one_line(e)})") from e
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DataError(f"{path}: expected a list of objects, found a {type(value).__name__}")
    for number, item in enumerate(value, 1):
        yield _object(path, f"item {number}", item)


def read_csv(path: Path) -> Iterator[Row]:
    """A header line, then one row each; every value is text."""
    csv.field_size_limit(LARGEST_CELL)
    with _text(path) as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = list(reader.fieldnames or ())
            if len(set(names)) < len(names):
                raise DataError(f"{path}: two columns have the same name in the header: {', '.join(names)}")
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(f"{path}, line {reader.line_num}: more or fewer values than the header has columns")
                yield row
        except csv.Error as e:
            raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({e})") from e


def read_parquet(path: Path) -> Iterator[Row]:
    """Rows of a parquet file.

    Parquet gives every struct of a column the same keys and fills the absent ones with null, so a tool call's arguments
    would come back with keys that nobody wrote. Nulls inside structs are therefore removed; whole columns keep theirs.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield {key: without_nulls(value) for key, value in row.items()}
    except (pa.ArrowException, LookupError) as e:  # LookupError: a time zone that this machine does not know
        raise DataError(f"{path}: not a readable parquet file ({one_line(e)})") from e


def without_nulls(value: Any) -> Any:
    """The value with null fields of its structs removed, at any depth. Nulls in lists stay: they have a position."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
}
