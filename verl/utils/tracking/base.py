"""What a sink is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Start:
    """What a sink is opened with.

    config: the resolved tree of the run, shown beside its metrics. resume: go on with the run that output_dir holds.
    """

    output_dir: Path
    run_name: str
    config: Mapping[str, Any]
    resume: bool = False


class Sink(Protocol):
    """One place for metrics. Built from a `Start`; its constructor raises MissingDependency without its library."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of one step."""

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: the run goes on from there. 0 forgets everything, the evaluation before the
        first step too. Called before the first log."""

    def close(self) -> None:
        """Write out whatever is still held."""


def flat(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """{a: {b: 1}} as {"a.b": 1}, for sinks that take a table of parameters."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{at}{key}.")
        else:
            out[f"{at}{key}"] = value
    return out


def read_run_id(start: Start, sink: str) -> str | None:
    """The run's id in an outside service, where this run resumes one that had it."""
    file = start.output_dir / f"{sink}_run_id.txt"
    return file.read_text(encoding="utf-8").strip() if start.resume and file.is_file() else None


def write_run_id(start: Start, sink: str, run_id: str) -> None:
    """Keep the id in the output folder, for a resume."""
    file = start.output_dir / f"{sink}_run_id.txt"
    temporary = file.with_suffix(".tmp")
    temporary.write_text(run_id, encoding="utf-8")
    os.replace(temporary, file)
