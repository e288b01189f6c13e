"""From a data set's name to its rows: generated, local or on the hub."""

from __future__ import annotations

from pathlib import Path

from verl.core import DataError
from verl.data.files import READERS, data_suffix, read_files
from verl.data.folders import split_files
from verl.data.gym import PREFIX, read_gym
from verl.data.hub import read_hub
from verl.data.rows import Rows


def open_rows(name: str, split: str, limit: int | None, seed: int, key: str = "data.dataset") -> Rows:
    """Rows of the data set called `name`, at most `limit`. A DataError starts with `key`, the setting it came from."""
    rows = _open(name, split, limit, seed, key)
    if not rows.rows:
        raise DataError(f"{key}={name}: the data set is empty")
    return rows


def _open(name: str, split: str, limit: int | None, seed: int, key: str) -> Rows:
    if name.startswith(PREFIX):
        return read_gym(name, limit, seed)
    path = Path(name).expanduser()
    if path.is_dir():
        return read_files(f"{name} [{split}]", split_files(path, split), limit)
    if path.exists():
        if not data_suffix(path):
            raise DataError(
                f"{key}={name}: cannot tell the format; expected a name ending in {', '.join(READERS)} (also .gz)"
            )
        return read_files(name, [path], limit)
    if _is_path(name):
        raise DataError(
            f"{key}={name}: no such file or folder; give an existing path, a hub id ORG/NAME, or reasoning_gym:TASK"
        )
    return read_hub(name, split, limit, key)


def _is_path(name: str) -> bool:
    """Whether a name that is not there was meant as a path: a hub id has at most one slash and no data ending."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name or bool(data_suffix(Path(name)))
