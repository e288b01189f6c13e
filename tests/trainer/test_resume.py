"""Kill at any moment, resume: the run is, bit for bit, the one that was never killed."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.trainer import tiny_run
from verl.core import CheckpointError, DataError
from verl.trainer import run
from verl.trainer.build import build
from verl.utils.console import RunConsole

ADAPTIVE = {"kl": {"coef": 0.05, "adaptive_target": 0.01, "adaptive_horizon": 100}}


def same(a, b) -> None:
    assert tiny_run.metrics(a) == tiny_run.metrics(b)
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_resume_is_the_uninterrupted_run(tmp_path, stop: int, dtype: str) -> None:
    """Stopped in the middle of the step after `stop`, when its rollout and rewards are done but not its update."""
    more = {"algorithm": ADAPTIVE, "model": {"dtype": dtype}, "update": {"epochs": 2, "mini_batches": 2}}
    whole, cut = {"trainer": {"output_dir": str(tmp_path / "a"), "save_every": 1}}, str(tmp_path / "b")
    run(tiny_run.config(tmp_path, **more, **whole))
    cfg = tiny_run.config(tmp_path, **more, trainer={"output_dir": cut, "save_every": 1})
    built = build(cfg, RunConsole())
    tiny_run.die_in_update(built.trainer, stop + 1)
    with pytest.raises(tiny_run.Killed):
        built.trainer.fit()
    result = run(tiny_run.config(tmp_path, **more, trainer={"output_dir": cut, "save_every": 1, "resume": True}))
    assert result.steps_trained == 6
    same(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_kill_9_of_the_process(tmp_path) -> None:
    """A real process, killed at several moments with no warning, each time resumed by the same command."""
    run(tiny_run.config(tmp_path, trainer={"output_dir": str(tmp_path / "a"), "save_every": 1}))
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(tiny_run.tree(tmp_path, trainer={"output_dir": str(tmp_path / "b"), "save_every": 1}))
    )
    command = [sys.executable, "-m", "verl.cli.main", "train", str(file), "trainer.resume=true"]
    metrics = tmp_path / "b" / "metrics.jsonl"
    for kills, delay in enumerate((0.0, 0.03, 0.11)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        before = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and len(metrics.read_text().splitlines()) > max(before, kills + 1):
                break
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "a", tmp_path / "b")


def test_damaged_checkpoint_is_passed_over(tmp_path, capsys) -> None:
    trainer = {"output_dir": str(tmp_path / "b"), "save_every": 1, "keep_checkpoints": 3}
    run(tiny_run.config(tmp_path, trainer={"output_dir": str(tmp_path / "a"), "save_every": 1}))
    run(tiny_run.config(tmp_path, trainer=trainer))
    newest = tmp_path / "b" / "checkpoints" / "step-000006" / "actor" / "rank-00000.safetensors"
    os.truncate(newest, newest.stat().st_size // 2)
    run(tiny_run.config(tmp_path, trainer={**trainer, "resume": True}))
    assert "[WARN] checkpoint passed over" in capsys.readouterr().out
    same(tmp_path / "a", tmp_path / "b")


def test_resume_refuses_another_configuration_or_data(tmp_path) -> None:
    trainer = {"save_every": 3}
    run(tiny_run.config(tmp_path, trainer=trainer))
    resumed = {**trainer, "resume": True}
    with pytest.raises(CheckpointError, match=r"actor.optim.lr: .* made with 0.001, this run has 0.002"):
        run(tiny_run.config(tmp_path, actor={"optim": {"lr": 2e-3}}, trainer=resumed))
    tiny_run.write_prompts(tmp_path / "prompts.jsonl", 23)
    with pytest.raises(DataError, match=r"data.dataset: the prompts are not those"):
        run(tiny_run.config(tmp_path, trainer=resumed))


def test_resume_of_a_finished_run_changes_nothing(tmp_path) -> None:
    run(tiny_run.config(tmp_path, trainer={"save_every": 3}))
    before = tiny_run.metrics(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    result = run(tiny_run.config(tmp_path, trainer={"save_every": 3, "resume": True}))
    assert result.steps_trained == 6
    after = tiny_run.metrics(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert before[0] == after[0] and all(torch.equal(before[1][k], after[1][k]) for k in before[1])
