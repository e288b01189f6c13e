"""Memory does not grow from step to step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.trainer import tiny_run

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "growth.py"


def growth(tmp_path: Path, algorithm: str, *words: str) -> tuple[int, dict[str, float]]:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_run.tree(tmp_path, algorithm)))
    command = [sys.executable, str(SCRIPT), "--config", str(config), "--algorithm", algorithm, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_resident_memory_after_step_5_stays(tmp_path: Path, algorithm: str) -> None:
    code, seen = growth(tmp_path, algorithm)
    assert code == 0 and seen["growth"] <= 0.02, seen


@pytest.mark.slow
def test_a_leak_is_seen(tmp_path: Path) -> None:
    """A reward function that keeps 4 MB a call: less would fit into what the process keeps of freed memory."""
    (tmp_path / "leak.py").write_text(
        "kept = []\ndef leak(prompts, responses):\n    kept.append(bytearray(b'1') * 2**22)\n"
        "    return [0.0] * len(responses)\n"
    )
    code, seen = growth(tmp_path, "grpo", "--set", f"reward.functions=[{{path: '{tmp_path}/leak.py:leak'}}]")
    assert code == 1 and 0.02 < seen["growth"] < 0.5, seen
