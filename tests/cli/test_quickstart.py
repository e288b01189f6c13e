"""The flags of examples/ppo/quickstart.py, and that it is the same run as quickstart.yaml."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from verl.algos.presets import preset_values
from verl.cli import reference
from verl.cli.arguments import run_main
from verl.cli.flags import FlagTable
from verl.config import RunConfig, read_yaml, resolve
from verl.core.errors import ConfigError

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ppo" / "quickstart.py"
MISSION_COMMAND = (
    "--actor_model_path ./models/llama3-8b-instruct --ref_model_path ./models/llama3-8b-instruct "
    "--reward_model_path ./models/rm --dataset_name trl-lib/ultrafeedback_binarized "
    "--output_dir ./outputs/ppo-llama3-quickstart --num_episodes 2 --max_steps_per_episode 100"
)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quickstart = load_script()


def parse(words: str) -> RunConfig:
    cfg, _ = FlagTable(quickstart.FLAGS, quickstart.configure).parse(words.split(), "")
    return cfg


def test_without_a_flag_it_is_the_yaml_file() -> None:
    assert parse("") == resolve([read_yaml(SCRIPT.with_suffix(".yaml"))], preset_values())
    assert parse("").data.dataset.startswith("reasoning_gym:chain_sum")


def test_every_flag_sets_its_paths_and_nothing_else() -> None:
    other = {"str": "other", "int": "3", "float": "0.25"}
    plain = parse("")
    for flag in quickstart.FLAGS:
        if flag.name in ("actor_model_path", "dataset_name", "algorithm"):
            continue  # these change which defaults hold; below
        text = (
            ""
            if flag.annotation is bool
            else (flag.choices or [other[reference.type_text(flag.annotation).split()[0]]])[-1]
        )
        changed = parse(f"--{flag.name} {text}")
        expected = flag.tree(text or True)
        assert changed == quickstart.configure([expected]) and changed != plain, flag.name
        for path in flag.paths:
            got = reference.show(reference.value_at(changed, path))
            assert got == (text or "true"), f"{flag.name} {path}"


def test_paths_of_flags_exist() -> None:
    rows, constants = reference.rows(), {row.path for page in reference.components() for row in page.rows}
    for flag in quickstart.FLAGS:
        for path in flag.paths:
            assert path in rows or path in constants, path
        assert flag.help


def test_the_command_of_the_docs_uses_the_class_defaults_for_a_model_and_data_of_its_own() -> None:
    cfg, plain = parse(MISSION_COMMAND), resolve([], preset_values())
    assert cfg.actor.path == cfg.ref.path == "./models/llama3-8b-instruct"
    assert (cfg.reward.model_path, cfg.data.dataset) == ("./models/rm", "trl-lib/ultrafeedback_binarized")
    assert (cfg.trainer.num_episodes, cfg.trainer.max_steps_per_episode) == (2, 100)
    assert cfg.actor.optim == plain.actor.optim and cfg.actor.optim.lr == 1e-6
    assert cfg.rollout.max_response_tokens == plain.rollout.max_response_tokens
    assert (cfg.data.system_prompt, cfg.data.examples) == (None, ())
    assert (cfg.algorithm.kl.coef, cfg.algorithm.policy_loss.constants["clip_low"]) == (0.1, 0.2)


def test_another_data_set_drops_the_prompting_and_keeps_the_model() -> None:
    for words in ("--dataset_name my.jsonl", "--set data.dataset=my.jsonl"):
        cfg = parse(words)
        assert cfg.data.system_prompt is None and cfg.data.examples == ()
        assert cfg.actor == parse("").actor


def test_algorithm_changes_what_it_presets() -> None:
    cfg = parse("--algorithm grpo --kl_coef 0.5 --ppo_clip_coef 0.1")
    assert (cfg.algorithm.kl.place, cfg.algorithm.kl.coef) == ("loss", 0.5)
    constants = cfg.algorithm.policy_loss.constants
    assert (constants["clip_low"], constants["clip_high"]) == (0.1, 0.1)


def test_text_stays_text() -> None:
    assert parse("--output_dir 2024").trainer.output_dir == "2024"
    assert parse("--learning_rate 1e-6").actor.optim.lr == 1e-6
    assert parse("--set trainer.sinks=[jsonl] --set trainer.seed=9").trainer.sinks == ("jsonl",)


@pytest.mark.parametrize("words", ["", "--algorithm grpo --kl_coef 0.7 --learning_rate 3e-7"])
def test_help_shows_values_in_force_and_paths(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        parse(f"{words} --help")
    assert e.value.code == 0
    shown, cfg = re.sub(r"\s+", "", capsys.readouterr().out), parse(words)
    for flag in quickstart.FLAGS:
        value = reference.show(reference.value_at(cfg, flag.paths[0]))
        assert re.sub(r"\s+", "", f"[{', '.join(flag.paths)} = {value}]") in shown, flag.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learning_rte 1e-6", "--learning_rte: unknown flag (did you mean '--learning_rate'?)"),
        ("--learning_rate -1", "--learning_rate: actor.optim.lr: input should be greater than 0, got -1"),
        ("--learning_rate fast", "--learning_rate: actor.optim.lr: input should be a valid number"),
        ("--num_episodes 1.5", "--num_episodes: trainer.num_episodes: input should be a valid integer"),
        ("--dtype fp8", "--dtype: model.dtype: input should be 'bfloat16' or 'float32', got 'fp8'"),
        ("--algorithm gropo", "--algorithm: algorithm.name: unknown preset 'gropo' (did you mean 'grpo'?)"),
        ("--set trainer.sed=1", "trainer.sed: unknown key (did you mean 'seed'?)"),
        ("--seed", "argument --seed: expected one argument"),
        ("--learning 1e-6", "--learning: unknown flag"),
        ("word", "word: unexpected argument"),
        ("--rollout.n 4", "--rollout.n: unknown flag (did you mean '--set rollout.n=4'?)"),
    ],
)
def test_bad_flags(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError):
        parse(words)
    assert run_main(lambda: quickstart.main(words.split())) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize("word", ["data=5", "data=null", "actor=5", "trainer=[1]"])
def test_a_section_that_is_no_mapping_is_named(word: str) -> None:
    with pytest.raises(ConfigError, match=f"^{word.split('=')[0]}: input should be a valid dictionary"):
        parse(f"--set {word}")


def test_a_value_that_is_no_yaml_names_its_flag() -> None:
    with pytest.raises(ConfigError, match="^--num_episodes: trainer.num_episodes: "):
        parse("--num_episodes {")
