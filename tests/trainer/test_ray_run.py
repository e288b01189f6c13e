"""A run embedded and on two processes: same samples, losses and weights. `test_faults` has runs that fail."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import tiny_run
from verl.trainer import run

TOLERANCE = 1e-5
MORE = {
    "update": {"epochs": 1, "mini_batches": 2},
    "trainer": {"num_episodes": 1, "max_steps_per_episode": 5, "save_every": 1},
}


def settings(folder: Path, out: str, **sections) -> dict:
    trainer = {**MORE["trainer"], "output_dir": str(folder / out), **sections.pop("trainer", {})}
    return {"update": MORE["update"], "trainer": trainer, **sections}


def distance(a: Path, b: Path) -> float:
    """Of all weights together, relative."""
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys()
    gap = sum(float((left[k].double() - right[k].double()).square().sum()) for k in left)
    return (gap / sum(float(v.double().square().sum()) for v in left.values())) ** 0.5


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """PPO with critic and reference; five steps of two updates. Then its last one again, embedded."""
    one, two = tmp_path / "one", tmp_path / "two"
    run(tiny_run.config(tmp_path, **settings(tmp_path, "one")))
    cfg = tiny_run.config(tmp_path, **settings(tmp_path, "two"), parallel={"nproc": 2, "deadline": 60.0})
    assert cfg.parallel.executor == "ray"
    run(cfg)
    same_metrics(one, two)
    assert (one / "samples" / "step-000004.jsonl").read_text() == (two / "samples" / "step-000004.jsonl").read_text()
    assert distance(one, two) < TOLERANCE

    for role in ("actor", "critic"):
        _one_copy(one / "checkpoints" / "step-000005" / role, two / "checkpoints" / "step-000005" / role)

    shutil.copytree(two, tmp_path / "third")
    shutil.rmtree(tmp_path / "third" / "checkpoints" / "step-000005")
    third = run(tiny_run.config(tmp_path, **settings(tmp_path, "third", trainer={"resume": True})))
    assert third.steps_trained == 5 and distance(one, tmp_path / "third") < TOLERANCE, "gone on with embedded"

    shutil.rmtree(one / "checkpoints" / "step-000005")
    again = settings(tmp_path, "one", trainer={"resume": True})
    run(tiny_run.config(tmp_path, **again, parallel={"nproc": 2, "deadline": 60.0}))
    assert distance(two, one) < TOLERANCE, "and the other way"


def _one_copy(one: Path, two: Path) -> None:
    """Two replicas write what one process does, each a part of it and nothing twice."""
    (want,) = [load_file(f) for f in one.glob("*.safetensors")]
    first, second = [load_file(f) for f in sorted(two.glob("*.safetensors"))]
    assert len(first) > 3 < len(second) and not first.keys() & second.keys()
    assert {**first, **second}.keys() == want.keys()


def same_metrics(one: Path, two: Path, steps: int = 5) -> None:
    left, right = tiny_run.metrics(one), tiny_run.metrics(two)
    assert len(left) == len(right) >= steps
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if name in ("rollout/prefilled_tokens", "rollout/reused_tokens"):
                continue  # how often a prompt is computed depends on what is beside it
            assert b[name] == pytest.approx(value, rel=TOLERANCE, abs=5e-6), (a["step"], name)


def test_gradients_add_up() -> None:
    """sum_over_ranks cuts by size and puts every number back where it was."""
    from verl.parallel import replicas

    tensors = [torch.arange(6.0).reshape(2, 3).T, torch.ones(2), torch.zeros(())]
    assert [len(b) for b in replicas._buckets(tensors)] == [3]
    old, replicas._BUCKET = replicas._BUCKET, 7
    try:
        assert [len(b) for b in replicas._buckets(tensors)] == [1, 2]
    finally:
        replicas._BUCKET = old
