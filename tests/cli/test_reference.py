"""The configuration reference says what the classes say, and the page in docs is not stale."""

import os
import subprocess
import sys
from pathlib import Path

from verl.algos.presets import preset_values
from verl.cli import catalogue, reference
from verl.config import RunConfig, parse_override, resolve
from verl.config.loader import leaves

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "reference.py"


def test_every_value_is_there_once() -> None:
    assert sorted(reference.rows()) == sorted(leaves(RunConfig))
    assert all(row.doc for row in reference.rows().values())


def test_the_shown_default_means_the_default() -> None:
    plain = resolve([])
    for path, row in reference.rows().items():
        assert resolve([parse_override(f"{path}={row.default}")]) == plain, path


def test_values_and_types_as_people_write_them() -> None:
    rows = reference.rows()
    assert (rows["actor.optim.lr"].default, rows["ref.path"].default) == ("1e-6", "null")
    assert rows["model.dtype"].type == "bfloat16 | float32"
    assert rows["trainer.max_steps_per_episode"].type == "int or null"
    assert rows["trainer.sinks"].type == "list of str"


def test_value_at_reads_components() -> None:
    cfg = resolve([{"algorithm": {"policy_loss": {"clip_low": 0.05}}}], preset_values())
    assert reference.value_at(cfg, "algorithm.policy_loss.clip_low") == 0.05
    assert reference.value_at(cfg, "algorithm.policy_loss") == "ppo_clip"
    assert reference.value_at(cfg, "algorithm.policy_loss.nothing") is None


def test_page_is_not_stale_and_staleness_is_seen(tmp_path: Path) -> None:
    assert (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8") == reference.markdown()
    assert (ROOT / "docs" / "reference" / "algorithms.md").read_text(encoding="utf-8") == catalogue.markdown()
    copy = tmp_path / "scripts" / "reference.py"
    copy.parent.mkdir()
    copy.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    run, env = [sys.executable, str(copy)], {**os.environ, "PYTHONPATH": str(ROOT)}
    stale = subprocess.run([*run, "--check"], capture_output=True, text=True, env=env)
    assert stale.returncode == 1 and "make docs" in stale.stderr
    assert subprocess.run(run, env=env).returncode == 0
    assert subprocess.run([*run, "--check"], env=env).returncode == 0


def test_page_lists_constants_of_components() -> None:
    page = reference.markdown()
    assert "`algorithm.policy_loss.clip_low`" in page and "`algorithm.advantage.lam`" in page
