"""Fixtures: a tokenizer, and tiny data files in every format."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny import make_tokenizer
from verl.config.data import DataConfig
from verl.data import PromptData, load_prompts

Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


def _as_text(name: str, rows: Rows) -> str:
    if ".csv" in name:
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()
    return "\n".join(map(json.dumps, rows)) if ".jsonl" in name else json.dumps(rows)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Rows], str]:
    """Write rows to a file of tmp_path in the format that its name says; gives the path as text."""

    def save(name: str, rows: Rows) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            data = _as_text(name, rows).encode()
            path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return save


@pytest.fixture
def load(tokenizer: Any) -> Callable[..., PromptData]:
    """Load with evaluation off unless asked for; keywords are fields of DataConfig."""

    def call(dataset: str, *, seed: int = 0, tok: Any = None, **fields: Any) -> PromptData:
        cfg = DataConfig(dataset=dataset, **({"eval_size": 0} | fields))
        return load_prompts(cfg, tok or tokenizer, seed)

    return call
