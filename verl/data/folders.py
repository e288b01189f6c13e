"""Which files of a folder make up a split. Pure functions of the file names."""

from __future__ import annotations

import re
from pathlib import Path

from verl.core import DataError
from verl.data.files import READERS, data_suffix

SHARD = re.compile(r"([-_.]\d+(-of-\d+)?)$")
SPLIT_WORDS = {"train", "test", "validation", "valid", "val", "dev", "eval"}


def split_files(folder: Path, split: str) -> list[Path]:
    """Files of `split`, in name order.

    A file belongs to the split that its name says once ending and shard number are gone (`train-00000-of-00002.parquet`
    or `train.jsonl`), or that its folder says (`train/0.parquet`); failing that, to one that the name contains as a
    word (`gsm8k_train.jsonl`). A folder whose names say no split at all is one split, whatever it is called.
    """
    files = sorted(p for p in folder.rglob("*") if p.is_file() and data_suffix(p) and not _hidden(p, folder))
    if not files:
        raise DataError(f"{folder}: no data file here; expected files ending in {', '.join(READERS)} (also .gz)")
    labels = {path: _label(path, folder) for path in files}
    chosen = [p for p in files if split in labels[p]]
    if not chosen:
        chosen = [p for p in files if split in _words(p)]
    if not chosen and not any(SPLIT_WORDS & (_words(p) | labels[p]) for p in files):
        chosen = files
    if not chosen:
        known = sorted({_stem(p) for p in files})
        raise DataError(
            f"{folder}: no file of split {split!r} (data.split); files here are of: {', '.join(known[:12])}"
        )
    _one_kind(folder, split, chosen)
    return chosen


def _one_kind(folder: Path, split: str, chosen: list[Path]) -> None:
    """Shards of one split share folder, base name and ending; a mixture is two data sets, and the user must choose."""
    homes = sorted({str(p.parent.relative_to(folder)) for p in chosen})
    if len(homes) > 1:
        raise DataError(f"{folder}: several folders hold split {split!r}: {', '.join(homes)}; give one as the data set")
    kinds = sorted({f"{_stem(p)}{data_suffix(p)}" for p in chosen})
    named_by_folder = split in homes[0].split("/")
    if len(kinds) > 1 and not (named_by_folder and len({data_suffix(p) for p in chosen}) == 1):
        raise DataError(
            f"{folder}: split {split!r} may mean {' or '.join(kinds)}; give one file, or a longer data.split"
        )


def _hidden(path: Path, folder: Path) -> bool:
    """Caches such as `.cache/`, and the settings files that hub folders carry beside their data."""
    parts = path.relative_to(folder).parts
    return any(part.startswith(".") for part in parts) or path.name in {"dataset_info.json", "dataset_infos.json"}


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return SHARD.sub("", name[: -len(Path(name).suffix)])


def _label(path: Path, folder: Path) -> set[str]:
    return {_stem(path), *path.relative_to(folder).parts[:-1]}


def _words(path: Path) -> set[str]:
    return set(re.split(r"[-_.]", _stem(path)))
