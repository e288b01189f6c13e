"""Four processes over gloo compute what one does; they start once, and run all of `checks.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.arch.imports import ROOT
from tests.parallel.checks import CHECKS
from tests.parallel.models import make

_SECONDS = 240


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By check, what failed, "" where nothing did."""
    folder = tmp_path_factory.mktemp("parallel")
    make(folder)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.parallel.worker"]
    workers = [subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, env=env) for rank in range(4)]
    try:
        codes = [worker.wait(_SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    found = json.loads((folder / "results.json").read_text())
    assert codes == [0] * 4 and found.keys() == CHECKS.keys(), f"exit codes {codes} after {list(found)}"
    return {name: fault for name, (fault, _) in found.items()}


@pytest.mark.parametrize("name", CHECKS)
def test_four_processes_compute_what_one_does(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]
