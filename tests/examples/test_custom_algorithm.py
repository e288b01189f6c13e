"""The example of an algorithm from outside: short, found from YAML by a path, and it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_model
from verl.algos.advantages import ADVANTAGES
from verl.algos.functional import compute_advantages, policy_loss
from verl.algos.policy_losses import POLICY_LOSSES
from verl.core.errors import ConfigError
from verl.core.outside import load_module

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "custom_algorithm"


def test_it_is_short() -> None:
    assert len((EXAMPLE / "my_algorithm.py").read_text().splitlines()) < 40


def test_it_trains_from_yaml(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    words = [f"actor.path={model}", "trainer.max_steps_per_episode=2", f"trainer.output_dir={tmp_path / 'out'}"]
    words += ["trainer.prompts_per_step=4", "eval.every=0", "data.eval_size=8", "trainer.sinks=[jsonl]"]
    command = [sys.executable, "-m", "verl.cli.main", "train", str(EXAMPLE / "config.yaml"), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "actor/policy_loss" in r] == [1, 2]
    assert "advantage: {name: capped_group" in (EXAMPLE / "config.yaml").read_text()


@pytest.fixture
def registered() -> Iterator[None]:
    before = set(sys.modules)
    load_module(str(EXAMPLE / "my_algorithm.py"), "test", ConfigError)
    yield
    for registry, name in ((ADVANTAGES, "capped_group"), (POLICY_LOSSES, "unclipped")):
        del registry._entries[name]
    for module in set(sys.modules) - before:
        del sys.modules[module]


@pytest.mark.usefixtures("registered")
def test_its_numbers() -> None:
    """It registers once imported, and is then there for `functional` as well."""
    rewards, mask = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.ones(4, 2)
    advantages, _ = compute_advantages("capped_group", rewards=rewards, mask=mask, group_ids=[7] * 4, scale=2.0)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.0, -1.0, -1.0, 3.0]), rtol=1e-5, atol=1e-5)
    far = torch.full((4, 2), 1.0)
    loss, _ = policy_loss("unclipped", logprobs=far, old_logprobs=far - 1, advantages=advantages, mask=mask)
    torch.testing.assert_close(loss, torch.tensor(0.0), rtol=0, atol=1e-5)
