"""The command `verl`: what it prints, and its exit codes."""

import errno
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import verl
from verl.algos.presets import PRESETS
from verl.cli.arguments import run_main
from verl.cli.main import main
from verl.config import RunConfig
from verl.core.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]


class FakeTrainer(types.ModuleType):
    """Stands for verl.trainer: notes the configuration, trains `short` steps fewer than planned."""

    def __init__(self, short: int = 0):
        super().__init__("verl.trainer")
        self.short, self.configs = short, []

    def run(self, cfg: RunConfig) -> types.SimpleNamespace:
        self.configs.append(cfg)
        return types.SimpleNamespace(steps_planned=5, steps_trained=5 - self.short, output_dir=Path("x"))


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    fake = FakeTrainer()
    monkeypatch.setitem(sys.modules, "verl.trainer", fake)
    return fake


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert e.value.code == 0
    assert main([]) == 0
    out = capsys.readouterr().out
    assert f"verl {verl.__version__}" in out and "train " in out and "algorithms " in out


def test_train_lays_overrides_over_file_over_preset(tmp_path: Path, trainer: FakeTrainer) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: {name: grpo, kl: {coef: 0.5}}\nactor: {optim: {lr: 3.0e-5}}\ntrainer: {seed: 4}\n")
    assert main(["train", str(file), "trainer.seed=7", "data.dataset=a=b.jsonl"]) == 0
    cfg = trainer.configs[0]
    assert (cfg.algorithm.name, cfg.algorithm.kl.place, cfg.algorithm.kl.coef) == ("grpo", "loss", 0.5)
    assert (cfg.actor.optim.lr, cfg.trainer.seed, cfg.data.dataset) == (3e-5, 7, "a=b.jsonl")
    assert cfg.trainer.resume is False


def test_train_without_a_file_and_with_flags_anywhere(trainer: FakeTrainer) -> None:
    assert main(["train", "--resume", "trainer.seed=7"]) == 0
    assert (trainer.configs[0].trainer.seed, trainer.configs[0].trainer.resume) == (7, True)


def test_train_with_nothing_to_train_is_an_error(trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train"], ["train", "--resume"]):
        assert main(words) == 2
        assert "needs a file, such as examples/ppo/quickstart.yaml" in capsys.readouterr().err
    assert trainer.configs == []


def test_too_few_steps_is_exit_code_1(trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.short = 2
    assert main(["train", "rollout.n=2"]) == 1
    assert capsys.readouterr().err == "error: 3 of 5 planned steps were trained\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "trian: unknown command (did you mean 'train'?)"),
        (["--verson"], "--verson: unknown flag (did you mean '--version'?)"),
        (["train", "--dryrun"], "--dryrun: unknown flag (did you mean '--dry-run'?)"),
        (["train", "--rollout.n", "4"], "--rollout.n: unknown flag (did you mean 'rollout.n=4'?)"),
        (["train", "a.b=1", "--rollout.n=4"], "--rollout.n: unknown flag (did you mean 'rollout.n=4'?)"),
        (["train", "--trainer.resume"], "--trainer.resume: unknown flag (did you mean 'trainer.resume=VALUE'?)"),
        (["config", "--rollout.n", "4"], "--rollout.n: unknown flag; see"),
        (["train", "missing.yaml"], "missing.yaml: no such config file"),
        (["train", "trainer.sed=1"], "trainer.sed: unknown key (did you mean 'seed'?)"),
        (["train", "seed=1"], "seed: unknown key (did you mean 'trainer.seed'?)"),
        (["train", "trainer.seed=-1"], "trainer.seed: input should be greater than or equal to 0, got -1"),
        (
            ["train", "reward.stream=maybe"],
            "reward.stream: input should be a valid boolean, unable to interpret input, or ",
        ),
        (["train", "trainer.seed=1", "word"], "'word': an override is written section.key=value"),
        (["train", "algorithm.name=gropo"], "algorithm.name: unknown preset 'gropo' (did you mean 'grpo'?)"),
        (["config", "actr"], "actr: no such section or value (did you mean 'actor'?)"),
        (["algorithms", "dappo"], "dappo: unknown preset (did you mean 'dapo'?)"),
        (["algorithms", "dapo", "x"], "x: unexpected argument"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1


def test_errors_of_the_run_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ModelError("actor.path: no model\nin two lines")

    def stop() -> int:
        raise KeyboardInterrupt

    assert run_main(fail) == 2
    assert capsys.readouterr().err == "error: actor.path: no model in two lines\n"
    assert run_main(stop) == 130


def test_our_own_bugs_keep_their_traceback() -> None:
    def broken() -> int:
        raise AssertionError

    with pytest.raises(AssertionError):
        run_main(broken)


@pytest.mark.parametrize("flags", [["-u"], []])
def test_a_reader_that_leaves_is_quiet_but_another_broken_pipe_is_not(flags: list[str]) -> None:
    code = "import sys; from verl.cli.main import main; sys.exit(main(['config']))"
    run = [sys.executable, *flags, "-c", code]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141

    def broken() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_main(broken)


def test_algorithms_lists_every_preset_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    out = capsys.readouterr().out
    for preset in PRESETS.values():
        assert f"{preset.name}\n" in out and preset.source in out


def test_algorithms_tells_what_one_preset_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "dapo"]) == 0
    out = capsys.readouterr().out
    assert "algorithm.filter = {constant_groups: resample, max_rounds: 10}" in out
    assert "reward.overlong = {buffer: 0.2, factor: 1.0}" in out and "gspo" not in out


def test_config_prints_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "actor.optim"]) == 0
    out = capsys.readouterr().out
    assert "actor.optim.lr = 1e-6  (float)\n      Peak learning rate." in out and "critic" not in out


def test_dry_run_trains_nothing(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = types.ModuleType("verl.cli.sizes")
    sizes.print_sizes = lambda cfg: print(f"sizes of seed {cfg.trainer.seed}")
    monkeypatch.setitem(sys.modules, "verl.cli.sizes", sizes)
    assert main(["train", "trainer.seed=3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "seed: 3" in out and out.endswith("sizes of seed 3\n") and trainer.configs == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str], number: int) -> None:
    def write() -> int:
        raise OSError(number, os.strerror(number), "out/metrics.jsonl")

    assert run_main(write) == 2
    assert capsys.readouterr().err == f"error: out/metrics.jsonl: {os.strerror(number)}; what was written before " + (
        "stays, go on with --resume\n"
    )


def test_a_terminal_without_unicode_does_not_end_a_run() -> None:
    code = "from verl.cli.arguments import run_main; run_main(lambda: print('to ./\\u00e9'))"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout == "to ./\\xe9\n" and not done.stderr
