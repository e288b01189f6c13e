"""Runs whose models are cut over processes in all ways at once: the samples and weights of the embedded run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_model
from tests.trainer import tiny_run
from tests.trainer.test_ray_run import TOLERANCE, distance, same_metrics, settings
from verl.trainer import run
from verl.trainer.build import build
from verl.trainer.early_scores import PARTS
from verl.utils.console import RunConsole
from verl.utils.timeline import timeline
from verl.workers import group_engine

pytestmark = pytest.mark.slow
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages and tensor ranks, generation with tp 4": {
        "nproc": 4,
        "pp": 2,
        "tp": 2,
        "generation_tp": 4,
        "ref": {"tp": 4, "pp": 1},
        "critic": {"tp": 1, "pp": 1, "fsdp": -1},
        "reward": {"fsdp": 2},
    },
    "each apart, generation of whole models": {
        "nproc": 2,
        "placement": "standalone",
        "tp": 2,
        "generation_tp": 1,
        "ref": {"nproc": 1, "tp": 1},
        "critic": {"nproc": 1, "tp": 1},
        "reward": {"nproc": 1},
    },
}
"""Beside them: `test_a_run_goes_on_in_any_layout` has FSDP, the last test has split placement."""


def short(folder: Path, out: str, **sections: Any) -> Any:
    trainer = {"max_steps_per_episode": 3, "save_every": 0}
    judge = folder / "judge"
    if not judge.exists():
        make_model(judge, "qwen2", head="reward", seed=4)
    reward = {"model_path": str(judge), "functions": [{"path": f"{folder / 'reward.py'}:digits", "weight": 3.0}]}
    return tiny_run.config(folder, **settings(folder, out, trainer=trainer, reward=reward, **sections))


def samples(out: Path) -> list[dict[str, Any]]:
    """What the last step drew."""
    return [json.loads(line) for line in (out / "samples" / "step-000003.jsonl").read_text().splitlines()]


def near(value: Any) -> Any:
    """The same but for rounding: a reward model's batches are of other sizes elsewhere."""
    if isinstance(value, dict):
        return {key: near(part) for key, part in value.items()}
    if isinstance(value, list):
        return [near(part) for part in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    run(short(folder, "one"))
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_changes_a_number(embedded: Path, name: str) -> None:
    out = name.replace(" ", "-")
    run(short(embedded, out, parallel={"deadline": 60.0, "threads": 1, **LAYOUTS[name]}))
    same_metrics(embedded / "one", embedded / out, steps=3)
    assert samples(embedded / out) == near(samples(embedded / "one"))
    assert distance(embedded / "one", embedded / out) < TOLERANCE


def test_a_run_goes_on_in_any_layout(embedded: Path) -> None:
    """Half a run on two processes that hold parts, the other half on one; and the other way round."""
    cut = {"nproc": 2, "fsdp": 2, "critic": {"pp": 2, "fsdp": 1}, "deadline": 60.0, "threads": 1}

    def part(out: str, episodes: int, **parallel: Any) -> None:
        trainer = {"max_steps_per_episode": 2, "num_episodes": episodes, "resume": out != "whole" and episodes == 2}
        run(tiny_run.config(embedded, **settings(embedded, out, trainer=trainer), parallel=parallel))

    part("whole", 2)
    part("down", 1, **cut)
    part("down", 2)
    part("up", 1)
    part("up", 2, **cut)
    for out in ("down", "up"):
        assert [row["step"] for row in tiny_run.metrics(embedded / out)] == [0, 1, 2, 3, 4]
        assert distance(embedded / "whole", embedded / out) < TOLERANCE, out


def test_the_critic_scores_while_the_actor_samples(
    embedded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes of its own it gets prompts as they are done, before the last one is; the timeline shows it."""
    parallel = {"nproc": 1, "placement": "split", "deadline": 60.0, "threads": 1}
    slowly = {"max_sequences": 1}  # one after the other, and told of at once, so that some are done well before others
    monkeypatch.setattr(group_engine, "_SLICE", 0.005)
    cfg = short(embedded, "overlap", parallel=parallel, rollout=slowly)
    built = build(cfg, RunConsole())
    try:
        built.trainer.fit()
        spans = list(built.trainer.roles.actor.pool.cluster.timeline)
    finally:
        built.close()
    scored = [s for s in spans if s.method == "values"]
    assert len(scored) == 3 * PARTS, "each step in parts"
    trained = min(s.start for s in spans if s.method == "update_actor")
    sampling = [s for s in spans if s.method == "advance" and s.start < trained]
    assert min(s.start for s in scored) < max(s.end for s in sampling), "in the first step already"
    print("\n".join(timeline(spans)))
    assert "critic" in capsys.readouterr().out
    same_metrics(embedded / "one", embedded / "overlap", steps=3)
