"""Bad input: each is one line that says what to do, exit code 2, no traceback."""

import json
import os

import pytest

from tests.acceptance import quickstart
from tests.tiny import make_model

ROWS = [{"question": f"What is {i} + 1 ?", "answer": f"#### {i + 1}"} for i in range(12)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Files that the rows of the table refer to by name."""
    folder = tmp_path_factory.mktemp("bad")
    make_model(folder / "actor", family="llama", seed=1)
    make_model(folder / "two", family="llama", seed=2, head="reward", labels=2)
    (folder / "good.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (folder / "odd.jsonl").write_text("".join(json.dumps({"colour": "red", "size": i}) + "\n" for i in range(5)))
    (folder / "empty.jsonl").write_text("")
    (folder / "model.txt").write_text("I am not a model.\n")
    (folder / "nothing").mkdir()
    (folder / "file").write_text("")
    return folder


TABLE = {
    "missing model path": ("--actor_model_path {p}/no-such-model", ["no-such-model"]),
    "text file as model": ("--actor_model_path {p}/model.txt", ["model.txt"]),
    "folder without a model": ("--actor_model_path {p}/nothing", ["nothing", "config.json"]),
    "missing reward model": ("--reward_model_path {p}/no-such-rm", ["no-such-rm"]),
    "reward model with two labels": ("--reward_model_path {p}/two", ["two", "2"]),
    "missing data file": ("--dataset_name {p}/none.jsonl", ["none.jsonl"]),
    "unknown columns": ("--dataset_name {p}/odd.jsonl", ["colour", "size", "prompt_column"]),
    "unknown column by name": ("--set data.prompt_column=text", ["text", "question"]),
    "empty data set": ("--dataset_name {p}/empty.jsonl", ["empty.jsonl"]),
    "every prompt too long": ("--max_prompt_tokens 2", ["max_prompt_tokens"]),
    "fewer prompts than a step": ("--prompts_per_step 50", ["prompts_per_step", "50"]),
    "one sample for grpo": ("--algorithm grpo --samples_per_prompt 1", ["samples_per_prompt", "at least 2"]),
    "unknown algorithm": ("--algorithm gropo", ["gropo", "did you mean 'grpo'"]),
    "unknown flag": ("--learning_rat 1e-6", ["--learning_rat", "--learning_rate"]),
    "unknown key": ("--set actor.optim.learning=1", ["actor.optim.learning", "lr"]),
    "value out of range": ("--learning_rate -1", ["learning_rate", "greater than 0"]),
    "value of another kind": ("--prompts_per_step many", ["prompts_per_step", "many"]),
    "unknown backend": ("--rollout vlm", ["vlm", "vllm"]),
    "unknown reasoning-gym task": ("--dataset_name reasoning_gym:chain_sun", ["chain_sun", "chain_sum"]),
    "unwritable output folder": ("--output_dir {p}/file/out", ["output_dir", "file/out"]),
    "reward function file missing": ("--set reward.functions=[{{path:\\ '{p}/r.py:f'}}]", ["r.py"]),
    "nothing scores": ("--set reward.verifier=off", ["reward", "--reward_model_path"]),
    "unknown sink": ("--set trainer.sinks=[jsonl,wandbb]", ["wandbb", "wandb"]),
}


@pytest.mark.parametrize("name", TABLE)
def test_one_line_and_exit_code_2(place, tmp_path, capsys, name: str) -> None:
    line, needles = TABLE[name]
    base = {
        "--actor_model_path": place / "actor",
        "--dataset_name": place / "good.jsonl",
        "--output_dir": tmp_path / "o",
    }
    given = _split(line.format(p=place))
    for flag, value in base.items():
        if flag not in given:
            given += [flag, str(value)]
    small = ["--prompts_per_step", "4", "--samples_per_prompt", "2", "--max_steps_per_episode", "1", "--eval_size", "2"]
    for flag, value in zip(small[::2], small[1::2], strict=True):
        if flag not in given:
            given += [flag, value]
    code = quickstart.here(*given)
    err = capsys.readouterr().err
    assert code == 2, err
    lines = err.strip().splitlines()
    assert lines and lines[-1].startswith("error: "), err
    assert "Traceback" not in err and sum(text.startswith("error:") for text in lines) == 1
    for needle in needles:
        assert needle in lines[-1], (needle, lines[-1])


def _split(line: str) -> list[str]:
    """Words of a line; `\\ ` is a space inside a word."""
    return [word.replace("\0", " ") for word in line.replace("\\ ", "\0").split(" ")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_write_permission(place, tmp_path, capsys) -> None:
    tmp_path.chmod(0o500)
    code = quickstart.here(
        "--actor_model_path", place / "actor", "--dataset_name", place / "good.jsonl", "--output_dir", tmp_path / "o"
    )
    assert code == 2 and "output_dir" in capsys.readouterr().err


def test_in_a_process_of_its_own(place) -> None:
    """Nothing but the line reaches stderr, and the exit code is the shell's."""
    done = quickstart.process("--actor_model_path", place / "no-such-model")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "flag,name,needles",
    [
        ("--dataset_name", "some/dataset", ["hf download --repo-type dataset some/dataset", "--dataset_name ./data"]),
        ("--actor_model_path", "some-org/some-model", ["hf download some-org/some-model", "--local-dir"]),
    ],
)
def test_no_network(place, tmp_path, flag: str, name: str, needles: list[str]) -> None:
    """A hub that does not answer: one line, in seconds, that says how to fetch beforehand and which flag takes it."""
    other = {"--actor_model_path": place / "actor", "--dataset_name": place / "good.jsonl", "--output_dir": tmp_path}
    words = [str(w) for pair in ({**other, flag: name}).items() for w in pair]
    done = quickstart.process(*words, timeout=60, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
    for needle in needles:
        assert needle in done.stderr
