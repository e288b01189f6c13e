"""A run small enough for a test: a tiny random model on a few prompts, in a second or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import make_model
from verl.algos.presets import preset_values
from verl.config import RunConfig, resolve
from verl.config.loader import Tree, overlay

VOLATILE = ("time/", "perf/")


def write_prompts(path: Path, count: int = 24) -> Path:
    rows = [{"question": f"What is {i} + {i % 7} ?", "answer": f"#### {i + i % 7}"} for i in range(count)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def tree(folder: Path, preset: str = "ppo", **sections: Any) -> Tree:
    """A configuration over files in `folder`, which get made where they are missing."""
    model, data = folder / "model", folder / "prompts.jsonl"
    if not model.exists():
        make_model(model, family="llama", seed=1)
        write_prompts(data)
        (folder / "reward.py").write_text(
            "def digits(prompts, responses):\n    return [sum(c.isdigit() for c in r) / 8 for r in responses]\n"
        )
    base: Tree = {
        "model": {"dtype": "float32"},
        "actor": {"path": str(model), "optim": {"lr": 1e-3}},
        "critic": {"optim": {"lr": 1e-3}},
        "data": {"dataset": str(data), "eval_size": 4},
        "reward": {"functions": [{"path": f"{folder / 'reward.py'}:digits"}]},
        "rollout": {"n": 4, "max_response_tokens": 8},
        "eval": {"every": 2},
        "algorithm": {"name": preset},
        "trainer": {
            "output_dir": str(folder / "out"),
            "prompts_per_step": 4,
            "num_episodes": 2,
            "max_steps_per_episode": 3,
            "log_every": 1,
            "sinks": ["jsonl"],
            "device": "cpu",
        },
    }
    return overlay(base, sections)


def config(folder: Path, preset: str = "ppo", **sections: Any) -> RunConfig:
    return resolve([tree(folder, preset, **sections)], preset_values())


def metrics(out: Path) -> list[dict[str, float]]:
    """Rows of metrics.jsonl without what the clock decides."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]


class Killed(BaseException):
    """Stands for a process that ends without warning."""


def die_in_update(trainer: Any, step: int) -> None:
    """The run dies in the update of training step `step`, after its rollout."""
    update = trainer.update

    def die_late(batch: Any) -> Any:
        if trainer.step == step:
            raise Killed
        return update(batch)

    trainer.update = die_late
