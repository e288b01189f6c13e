"""metrics.jsonl: one line a step, `{"step": 3, "reward": 0.41, ...}`.

Numbers are written as Python's repr, so reading gives the same bits. JSON has no NaN or infinity: they are the strings
"nan", "inf" and "-inf", which `float()` and `read_metrics` read back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from verl.core.errors import CheckpointError
from verl.utils.tracking.base import Start

FILE = "metrics.jsonl"


def read_metrics(file: str | Path) -> list[dict[str, float]]:
    """All complete lines of a metrics file, numbers as floats and `step` as an int. A torn last line is left out."""
    return [{k: v if k == "step" else float(v) for k, v in row.items()} for row in _rows(Path(file))]


def _rows(file: Path) -> list[dict[str, float]]:
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1] if line]  # what follows the last newline is torn or nothing
    except json.JSONDecodeError as e:
        raise CheckpointError(f"{file}: a line is not JSON ({e.msg}); restore the file, or move it away") from e


def _number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))


class JsonlSink:
    """Each line reaches the operating system at once: a killed process loses no finished step."""

    def __init__(self, start: Start):
        self._path = start.output_dir / FILE
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row = {"step": step, **{name: _number(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Rewrite the file without the later steps (and without a line torn by a kill), atomically."""
        kept = [row for row in _rows(self._path) if row["step"] <= step and step > 0]
        self._file.close()
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()
