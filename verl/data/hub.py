"""Hub data sets: the one file that imports `datasets`."""

from __future__ import annotations

import os
from pathlib import Path

from verl.core import DataError, MissingDependency
from verl.data.rows import Row, Rows, one_line

PROBE_SECONDS = 10.0


def read_hub(name: str, split: str, limit: int | None = None, key: str = "data.dataset") -> Rows:
    """Rows of a split of `ORG/NAME` or `ORG/NAME:CONFIG`.

    One short request comes first, so that a machine without network fails in seconds and not after minutes of retries.
    With HF_HUB_OFFLINE=1 only the local cache is read.
    """
    repo, _, config = name.partition(":")
    try:
        import datasets
    except ImportError as e:
        raise MissingDependency(
            f'{key}={name}: hub data sets need the package datasets: pip install "verl[hub]"; or {_fetch(repo, key)}'
        ) from e
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in {"1", "ON", "YES", "TRUE"}:
        probe(repo, key)
    try:
        table = datasets.load_dataset(repo, config or None, split=split)
        rows: list[Row] = list(table.select(range(min(limit or len(table), len(table)))))
    except Exception as e:  # whatever the library met, the user needs the same line; nothing is swallowed
        hint = f"choose one with {key}={repo}:CONFIG; " if "config" in str(e).lower() and not config else ""
        raise DataError(f"{key}={name}, split {split!r}: {one_line(e)}; {hint}or {_fetch(repo, key)}") from e
    return Rows(f"{name} [{split}]", rows)


def probe(repo: str, key: str) -> None:
    """Ask the hub once whether the data set is there; a DataError says what to do if not."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(repo, timeout=PROBE_SECONDS)
    except HFValidationError as e:
        raise DataError(f"{key}={repo}: neither a file or folder here nor a valid hub id") from e
    except GatedRepoError as e:
        raise DataError(
            f"{key}={repo}: access must be granted on the hub first; then log in with `hf auth login`"
        ) from e
    except RepositoryNotFoundError as e:
        raise DataError(
            f"{key}={repo}: no such file or folder here, and no such data set on the hub "
            "(if it is private, log in with `hf auth login`)"
        ) from e
    except Exception as e:  # each version of the client has its own network errors
        raise DataError(
            f"{key}={repo}: the hub cannot be reached ({one_line(e)}); {_fetch(repo, key)} "
            "(or set HF_HUB_OFFLINE=1 if it is in the local cache)"
        ) from e


def _fetch(repo: str, key: str) -> str:
    folder = f"./data/{Path(repo).name}"
    return (
        f"fetch it beforehand with `hf download --repo-type dataset {repo} --local-dir {folder}` "
        f"and give {'--dataset_name ' + folder + ' or ' if key == 'data.dataset' else ''}{key}={folder}"
    )
