"""The run's folder: nothing of the user's is lost in it, whatever it holds and whoever else writes there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import tiny_run
from verl.core import CheckpointError, ConfigError, MissingDependency, RolloutError
from verl.trainer import run
from verl.trainer.build import build, read_inputs
from verl.trainer.checks import check_outputs
from verl.trainer.folder import RunFolder
from verl.trainer.resume import refuse_other_run
from verl.utils.console import RunConsole

ONE_STEP = {"num_episodes": 1, "max_steps_per_episode": 1}


@pytest.mark.parametrize("key", ["actor", "ref", "critic", "reward", "data"])
def test_a_folder_that_is_read_is_never_written(tmp_path: Path, key: str) -> None:
    field = {"reward": "model_path", "data": "dataset"}.get(key, "path")
    (tmp_path / "out").mkdir()
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=f"also {key}.{field}"):
        check_outputs(tiny_run.config(tmp_path, **{key: {field: f"{tmp_path}/x/../out/"}}))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors", "checkpoints", "samples"])
def test_files_of_the_user_are_refused_before_a_model_loads(tmp_path: Path, name: str, overwrite: bool) -> None:
    mine = tmp_path / "out" / name
    mine.parent.mkdir()
    mine.write_text("learning_rate: 1")
    cfg = tiny_run.config(tmp_path, trainer={"overwrite": overwrite})
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"holds {name}, which no run made"):
        run(cfg)
    assert mine.read_text() == "learning_rate: 1"


def test_files_beside_a_run_stay_when_it_is_removed(tmp_path: Path) -> None:
    cfg = tiny_run.config(tmp_path, "grpo", trainer=ONE_STEP)
    run(cfg)
    for name in ("vocabulary.txt", "tokenizer_notes.md", "other.safetensors"):
        (tmp_path / "out" / name).write_text("mine")
    run(tiny_run.config(tmp_path, "grpo", trainer={**ONE_STEP, "overwrite": True}))
    for name in ("vocabulary.txt", "tokenizer_notes.md", "other.safetensors"):
        assert (tmp_path / "out" / name).read_text() == "mine"


def test_resume_without_a_checkpoint_keeps_the_finished_run(tmp_path: Path) -> None:
    run(tiny_run.config(tmp_path, "grpo", trainer=ONE_STEP))
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    run(tiny_run.config(tmp_path, "grpo", trainer={**ONE_STEP, "resume": True}))
    assert (tmp_path / "out" / "previous-1" / "metrics.jsonl").read_text() == before


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    code = "import sys; from verl.trainer.folder import RunFolder; f = RunFolder(sys.argv[1]); print(1); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "1\n"
        with pytest.raises(ConfigError, match="another run is going on"):
            RunFolder(tmp_path)
        other.kill()
    RunFolder(tmp_path)


def test_the_home_folder_and_names_that_no_system_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/out").root == tmp_path / "out"
    for name in ("a\0b", "a" * 300):
        with pytest.raises(ConfigError, match="trainer.output_dir: cannot write"):
            RunFolder(tmp_path / name)


def test_resume_and_overwrite_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep one of them"):
        run(tiny_run.config(tmp_path, trainer={"resume": True, "overwrite": True}))


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"rollout": {"backend": "vllm"}}, RolloutError, "not part of this version"),
        ({"rollout": {"backend": "vlm"}}, ConfigError, "did you mean 'vllm'"),
        ({"model": {"implementation": "transformers"}}, RolloutError, "rollout.backend=hf"),
        ({"trainer": {"sinks": ["wandbb"]}}, ConfigError, "did you mean 'wandb'"),
        ({"eval": {"sampling": {"min_tokens": 9}}}, ConfigError, "eval.sampling.min_tokens: 9 is more than the 8"),
    ],
)
def test_what_the_config_alone_tells_is_refused_in_a_dry_run(tmp_path: Path, sections, error, message: str) -> None:
    with pytest.raises(error, match=message):
        read_inputs(tiny_run.config(tmp_path, **sections))


def test_a_missing_library_leaves_the_earlier_run_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tiny_run.config(tmp_path, "grpo", trainer=ONE_STEP))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install wandb"):
        build(tiny_run.config(tmp_path, trainer={"sinks": ["wandb"]}), RunConsole())
    assert (tmp_path / "out" / "config.json").is_file() and not (tmp_path / "out" / "previous-1").exists()


@pytest.mark.parametrize("manifest", [{}, {"config": [], "data": ""}, {"config": {}}])
def test_a_manifest_of_no_run(tmp_path: Path, manifest) -> None:
    with pytest.raises(CheckpointError, match="which run made it"):
        refuse_other_run(manifest, {"config": {}, "data": ""}, tmp_path)
