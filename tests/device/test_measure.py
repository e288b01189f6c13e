"""The device script runs everywhere with --tiny, and its answers are those of a model that works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("measure.py")
PAGE = SCRIPT.parents[2] / "docs" / "gpu-arithmetic.md"


def _named_on_the_page() -> list[tuple[str, list[str]]]:
    """(row, columns) of the table that says where each number of the page is measured; --tiny rolls out 1 and 3."""
    table = PAGE.read_text(encoding="utf-8").partition("| here | row | column |")[2].partition("\n\n")[0]
    cells = [line.split("|") for line in table.splitlines()[2:]]
    named = [(re.findall("`([^`]+)`", c[2]), re.findall("`([^`]+)`", c[3])) for c in cells]
    return [(row.replace("rollout 128", "rollout 3"), columns) for rows, columns in named for row in rows]


def test_tiny_measures_everything(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    assert found["parity float32"]["sampler max"] < 1e-4 and found["parity float32"]["transformers max"] < 1e-4
    assert found["parity float32"]["greedy alike"] == 1.0 and found["parity bfloat16"]["sampler mean"] > 0
    assert found["publish"]["versions"] == 6
    for name in ("rollout 1", "rollout 3"):
        assert found[name]["native tok/s"] > 0 and found[name]["generate tok/s"] > 0
    apart, shared = found["update prompts apart"], found["update shared prompts"]
    assert shared["tokens"] < apart["tokens"] == 2 * 2 * (4 + 8 - 1), "the last token is nobody's input"
    assert found["update recomputed"]["tokens"] == shared["tokens"]
    for row, columns in _named_on_the_page():
        assert [name for name in columns if name not in found[row]] == [], f"{row}: named in {PAGE.name}, not printed"
    assert not [row for row in found.values() if "skipped" in row and row["skipped"] != "--tiny"]


def test_what_no_time_is_left_for_is_named() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny", "--budget", "0"], capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "were spent before it" in found["rollout 3"]["skipped"] and "were spent before it" in done.stdout
