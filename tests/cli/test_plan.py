"""`verl plan`: what it prints, that it can be pasted, and what it refuses."""

import json
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig

from verl.algos.presets import preset_values
from verl.cli.main import main
from verl.config import parse_override, read_yaml, resolve

BIG = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    LlamaConfig(**BIG).save_pretrained(tmp_path / "model")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"actor: {{path: {tmp_path / 'model'}}}\nupdate: {{activation_checkpointing: true}}\n"
        "algorithm: {kl: {coef: 0.01}}\n"
    )
    return file


def test_prints_plans_reasons_and_what_to_paste(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "rollout.n=4", "--gpus", "8", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "actor 6.74B, ref 6.74B, critic 6.61B parameters" in out
    assert "Generate: decoding" in out and "Did not fit: " in out
    command = shlex.split(out.splitlines()[-1])
    assert command[:4] == ["verl", "train", str(config), "rollout.n=4"]
    cfg = resolve([read_yaml(command[2]), *map(parse_override, command[3:])], preset_values())
    assert cfg.parallel.nproc > 1 and cfg.parallel.executor == "ray" and cfg.rollout.n == 4


def test_json_is_the_same_and_a_config_alone_is_enough(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config.parent / "model" / "config.json"
    words = [f"actor.path={path}", "algorithm.name=grpo", "algorithm.kl.coef=0", "update.activation_checkpointing=true"]
    assert main(["plan", *words, "--gpus", "8", "--json", "--top", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["plans"]) == 2 and found["gpus"] == 8
    first = found["plans"][0]
    assert set(first["pools"][0]["roles"]) == {"actor"}  # grpo without KL: no reference, no critic
    stages = first["seconds"]
    assert stages["step"] == pytest.approx(sum(s for name, s in stages.items() if name != "step"))
    assert first["pools"][0]["memory_gb"] <= 0.9 * 80


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --gpus; see verl plan --help"),
        (["--gpus", "0"], "--gpus: 0 must be above 0"),
        (["--gpus", "x"], "argument --gpus: invalid int value: 'x'; see verl plan --help"),
        (["--gpus", "8", "--gpu_memory_gb", "-1"], "--gpu_memory_gb: -1 must be above 0"),
        (["--gpus", "8", "--tflops", "nan"], "--tflops: nan must be above 0"),
        (["--gpus", "8", "--top", "0"], "--top: 0 must be 1 or more"),
        (["--gpus", "8", "--gpu_memory", "80"], "--gpu_memory: unknown flag (did you mean '--gpu_memory_gb'?)"),
        (["--gpus", "1"], "--gpus: nothing fits into 1 of 80 GB"),
    ],
)
def test_refuses_in_one_line(flags: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0 and "usage: verl plan [CONFIG.yaml] [section.key=value ...] --gpus N" in out
    assert "a plan fills 0.9 of it" in out


def test_names_the_smallest_number_that_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--gpus", "1"]) == 2
    text = capsys.readouterr().err
    smallest = int(text.split("--gpus ")[1].split(" would do")[0])
    assert smallest > 1 and main(["plan", str(config), "--gpus", str(smallest)]) == 0
    assert main(["plan", str(config), "--gpus", str(smallest - 1)]) == 2


def test_needs_a_config_and_a_model_that_it_knows(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "8"]) == 2
    assert "verl plan needs a file" in capsys.readouterr().err
    (tmp_path / "x.json").write_text('{"model_type": "gpt2"}')
    assert main(["plan", str(config), f"actor.path={tmp_path / 'x.json'}", "--gpus", "8"]) == 2
    assert "actor.path: a plan needs the shape of the model" in capsys.readouterr().err
