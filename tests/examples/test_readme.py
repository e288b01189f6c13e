"""The README's Python of "From quickstart to production", run on a tiny model."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tiny import make_model

ROOT = Path(__file__).resolve().parents[2]


def test_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands there, but for the length of the run and the number of prompts in a step."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## From quickstart to production")[1]
    reward, trainer = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    assert "FSDPPPOTrainer" in trainer
    monkeypatch.chdir(tmp_path)
    models: dict[str, Any] = {
        "actor_model": AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "actor")),
        "ref_model": str(make_model(tmp_path / "ref", seed=1)),
        "reward_model": AutoModelForSequenceClassification.from_pretrained(make_model(tmp_path / "rm", head="reward")),
    }
    exec(reward, models)
    small = 'prompts_per_step=4, max_steps_per_episode=1, device="cpu", eval_size=0, output_dir='
    assert trainer.count("output_dir=") == 1
    exec(trainer.replace("output_dir=", small), models)
    assert models["result"].steps_trained == 2
    parts = models["result"].metrics
    total = parts["reward/reward_model"] + 0.5 * parts["reward/custom_reward_fn"]
    assert parts["reward"] == pytest.approx(total)
    assert (tmp_path / "outputs" / "mine" / "model.safetensors").is_file()
