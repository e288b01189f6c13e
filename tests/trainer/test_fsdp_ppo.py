"""FSDPPPOTrainer: the run that its arguments mean, the rewards it adds, and every refusal."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny import make_model, make_tokenizer
from tests.trainer import tiny_run
from verl.algos.presets import preset_values
from verl.config import RunConfig, resolve
from verl.config.loader import overlay
from verl.core.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError, VerlError
from verl.trainer import run
from verl.trainer.ppo import FSDPPPOTrainer
from verl.trainer.ppo.fsdp_config import FSDPConfig

FSDP = {"fsdp_size": -1, "param_offload": True, "mixed_precision": {"param_dtype": "fp32"}}
SHORT = {"trainer": {"num_episodes": 1, "max_steps_per_episode": 2}, "eval": {"every": 0}, "data": {"eval_size": 0}}


def digits(prompts: list[str], responses: list[str]) -> list[float]:
    return [sum(c.isdigit() for c in r) / 8 for r in responses]


def short_tree(folder: Path, **sections: Any) -> dict[str, Any]:
    """Two steps on the tiny model, without models and reward: those are arguments."""
    tree = overlay(tiny_run.tree(folder, **SHORT), sections)
    return {k: v for k, v in tree.items() if k not in ("actor", "reward")} | {"actor": {"optim": {"lr": 1e-3}}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_modules_and_paths_train_as_run_does(tmp_path: Path) -> None:
    """Actor, reference, critic and reward model as paths, then loaded: the weights of `run`, to the bit."""
    tree, actor = short_tree(tmp_path), tmp_path / "model"
    ref = make_model(tmp_path / "ref", seed=5)
    judge = make_model(tmp_path / "rm", seed=2, head="reward")
    models = {"actor": {"path": str(actor)}, "ref": {"path": str(ref)}, "reward": {"model_path": str(judge)}}
    out = {"trainer": {"output_dir": str(tmp_path / "plain")}, "critic": {"path": str(judge)}}
    cfg = resolve([tree, models, out], preset_values())
    plain = run(cfg, [(digits, 0.5)])
    assert not same(tmp_path / "plain", actor)

    paths = FSDPPPOTrainer(
        actor, ref, judge, judge, fsdp_config=FSDP, config=tree, output_dir=tmp_path / "paths", nproc=1
    )
    loaded = FSDPPPOTrainer(
        actor_model=AutoModelForCausalLM.from_pretrained(actor),
        ref_model=AutoModelForCausalLM.from_pretrained(ref),
        reward_model=(rm := AutoModelForSequenceClassification.from_pretrained(judge)),
        critic_model=rm,
        tokenizer=AutoTokenizer.from_pretrained(actor),
        fsdp_config=FSDP,
        config=tree,
        output_dir=tmp_path / "loaded",
    )
    for trainer, name in ((paths, "paths"), (loaded, "loaded")):
        trainer.add_reward_fn(digits, weight=0.5)
        result = trainer.fit()
        assert result.output_dir == tmp_path / name and result.steps_trained == result.steps_planned == 2
        assert same(tmp_path / "plain", tmp_path / name), name
        assert not (tmp_path / name / ".inputs").exists()
        both = result.metrics["reward"], result.metrics["reward/reward_model"] + 0.5 * result.metrics["reward/digits"]
        assert both[0] == pytest.approx(both[1], rel=1e-6) and both[0] == plain.metrics["reward"]
    assert (paths.config.actor.path, paths.config.critic.path) == (str(actor), str(judge))
    assert AutoTokenizer.from_pretrained(tmp_path / "loaded").chat_template


def test_data_in_memory_is_data_of_a_file(tmp_path: Path) -> None:
    """Rows, a table and a file; the second run moves the first aside and begins with the same weights."""
    tree, actor = short_tree(tmp_path), tmp_path / "model"
    module = AutoModelForCausalLM.from_pretrained(actor)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    trainer = FSDPPPOTrainer(module, config=tree, output_dir=tmp_path / "out")
    trainer.add_reward_fn(digits)
    trainer.fit(str(tmp_path / "prompts.jsonl"))
    for dataset in (rows, Table(rows)):
        trainer.fit(dataset)
        assert same(tmp_path / "out", tmp_path / "out" / "previous-1")
    assert (tmp_path / "out" / "previous-2").is_dir()
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())

    prompts = FSDPPPOTrainer(actor, config=tree, output_dir=tmp_path / "texts", max_steps_per_episode=1)
    prompts.add_reward_fn(lambda prompts, responses: [float("7" in p) for p in prompts])
    assert prompts.fit([f"Say {i} ." for i in (7, 17, 27, 70)]).metrics["reward"] == 1.0


class Table(list):
    """Stands for a datasets.Dataset: rows, with names of columns."""

    column_names = ("question", "answer")

    def __init__(self, rows: list[dict[str, Any]]):
        super().__init__(rows)
        self.column_names = list(rows[0])  # type: ignore[assignment]


def test_resume_from_memory(tmp_path: Path) -> None:
    """Stopped after its first checkpoint and gone on with: the run that was never stopped. Other inputs are refused."""
    tree, rows = short_tree(tmp_path), [f"Say {i} ." for i in range(16)]

    def fit(out: str, dataset: list[str] = rows, seed: int = 1, **overrides: Any) -> None:
        module = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / f"seed-{seed}", seed=seed))
        trainer = FSDPPPOTrainer(module, config=tree, output_dir=tmp_path / out, save_every=1, **overrides)
        trainer.add_reward_fn(digits)
        trainer.fit(dataset)

    fit("whole")
    with pytest.raises(RewardError, match="stopped"):
        stopped = FSDPPPOTrainer(
            AutoModelForCausalLM.from_pretrained(tmp_path / "seed-1"),
            config=tree,
            output_dir=tmp_path / "cut",
            save_every=1,
        )
        stopped.add_reward_fn(Stops())
        stopped.fit(rows)
    assert not (tmp_path / "cut" / ".inputs").exists(), "a run that fails leaves nothing in the way"
    with pytest.raises(CheckpointError, match="actor.path: "):
        fit("cut", seed=2, resume=True)
    with pytest.raises(CheckpointError, match="data.dataset: "):
        fit("cut", dataset=rows[::-1], resume=True)
    fit("cut", resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")


class Stops:
    """`digits` in the first call, and an error in the second."""

    __name__ = "digits"
    calls = 0

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("stopped")
        return digits(prompts, responses)


def config_of(fsdp_config: Any = None, config: Any = None, **more: Any) -> RunConfig:
    return FSDPPPOTrainer("some/model", fsdp_config=fsdp_config, config=config, **more).config


def test_fsdp_config_sets_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def meant(fsdp_config: Any = None, **more: Any) -> tuple[Any, ...]:
        cfg = config_of(fsdp_config, **{"device": "cpu", **more})
        return cfg.parallel.nproc, cfg.parallel.executor, cfg.parallel.fsdp, cfg.update.cpu_offload, cfg.model.dtype

    bf16, fp32 = "bfloat16", "float32"
    assert meant() == (1, "embedded", -1, False, bf16)
    assert meant(FSDP, nproc=4) == (4, "ray", -1, True, fp32)
    assert meant({"fsdp_size": 2, "optimizer_offload": True}, nproc=4) == (4, "ray", 2, True, bf16)
    precision = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    assert meant({"mixed_precision": precision, "param_offload": False}) == (1, "embedded", -1, False, fp32)
    assert meant(FSDPConfig(fsdp_size=1), nproc=2) == (2, "ray", 1, False, bf16)
    given = {"parallel": {"nproc": 2, "fsdp": 1}, "update": {"cpu_offload": True}, "model": {"dtype": fp32}}
    assert meant(config=given) == (2, "ray", 1, True, fp32), "what is left out stays as the configuration says"
    assert meant({"fsdp_size": -1}, config=given, nproc=4) == (4, "ray", -1, True, fp32)
    assert meant(config=resolve([given], preset_values())) == (2, "ray", 1, True, fp32)
    assert meant(config=RunConfig(), nproc=2) == (2, "ray", None, False, bf16)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert meant(device="auto") == (8, "ray", -1, False, bf16)
    assert meant(device="auto", nproc=1) == (1, "embedded", -1, False, bf16)
    assert meant(config=given, device="auto") == (2, "ray", 1, True, fp32)


def test_overrides_are_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {n: 3}\ntrainer: {seed: 4, max_steps_per_episode: 9}\n")
    cfg = config_of(
        config=file,
        output_dir=tmp_path / "out",
        algorithm="grpo",
        learning_rate=1e-4,
        kl_coef=0.5,
        ppo_clip_coef=0.1,
        num_episodes=3,
        max_steps_per_episode=None,
        eval_dataset=tmp_path / "eval.jsonl",
        resume=True,
    )
    assert (cfg.rollout.n, cfg.trainer.seed, cfg.trainer.max_steps_per_episode) == (3, 4, None)
    assert (cfg.algorithm.advantage.name, cfg.actor.optim.lr, cfg.algorithm.kl.coef) == ("grpo", 1e-4, 0.5)
    constants = cfg.algorithm.policy_loss.constants
    assert (constants["clip_low"], constants["clip_high"]) == (0.1, 0.1)
    assert (cfg.trainer.num_episodes, cfg.trainer.resume) == (3, True)
    assert (cfg.trainer.output_dir, cfg.data.eval_dataset) == (str(tmp_path / "out"), str(tmp_path / "eval.jsonl"))
    assert cfg.actor.path == "some/model"


class Peft(nn.Module):
    config: Any = None
    peft_config = True

    def __init__(self, quantized: bool = False, peft: bool = False):
        super().__init__()
        self.config = type("Config", (), {"quantization_config": {} if quantized else None})
        self.peft_config = peft

    def save_pretrained(self, folder: Path) -> None:
        raise OSError("no room")


REFUSED: list[tuple[dict[str, Any], type[VerlError], str]] = [
    ({"actor_model": None}, ConfigError, "actor_model: give a path or a loaded model"),
    ({"actor_model": 3}, ConfigError, "actor_model: expected a path, a hub id or a loaded model, found a int"),
    ({"ref_model": nn.Linear(1, 1)}, ModelError, "ref_model: a Linear is no Hugging Face model; load one"),
    ({"critic_model": Peft(peft=True)}, ModelError, "critic_model: adapters on a model"),
    ({"reward_model": Peft(quantized=True)}, ModelError, "reward_model: the module is quantized; load it in bf16"),
    ({"tokenizer": make_tokenizer()}, ConfigError, "tokenizer: it goes with a loaded actor_model"),
    ({"actor_model": Peft(), "tokenizer": "gpt2"}, ConfigError, "tokenizer: expected a transformers tokenizer"),
    ({"learning_rte": 1}, ConfigError, "learning_rte: unknown argument (did you mean 'learning_rate'?)"),
    ({"actor_modell": "x"}, ConfigError, "actor_modell: unknown argument (did you mean 'actor_model'?)"),
    ({"reward_model_path": "x"}, ConfigError, "reward_model_path: unknown argument; give reward_model="),
    ({"learning_rate": -1.0}, ConfigError, "learning_rate: actor.optim.lr: input should be greater than 0"),
    ({"learning_rate": None}, ConfigError, "learning_rate: actor.optim.lr: input should be a valid number"),
    ({"dtype": "float32", "fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}}, ConfigError, "dtype: float32 "),
    ({"algorithm": "grpo", "config": RunConfig()}, ConfigError, "algorithm: a RunConfig has all the values of ppo"),
    ({"config": 5}, ConfigError, "config: expected a RunConfig, a YAML file or a dict, found a int"),
    ({"config": "missing.yaml"}, ConfigError, "missing.yaml: no such config file"),
    ({"config": {"actr": {}}}, ConfigError, "actr: unknown key (did you mean 'actor'?)"),
    ({"config": {"parallel": 3}}, ConfigError, "parallel: input should be a valid dictionary"),
    ({"nproc": 0}, ConfigError, "parallel.nproc: input should be greater than or equal to 1, got 0"),
    ({"address": "auto"}, ConfigError, "nproc: how many processes of the cluster at auto?"),
    ({"nproc": 4, "fsdp_config": {"fsdp_size": 3}}, ConfigError, "fsdp_config.fsdp_size: 3 does not divide the 4 data"),
    ({"fsdp_config": {"fsdp_size": 2}}, ConfigError, "fsdp_config.fsdp_size: 2 does not divide the 1 data"),
    ({"fsdp_config": [1]}, ConfigError, "fsdp_config: expected a dict such as {'fsdp_size': -1}, found [1]"),
    ({"fsdp_config": {"fsdp_sise": 1}}, ConfigError, "fsdp_config.fsdp_sise: unknown key (did you mean 'fsdp_size'?)"),
    ({"fsdp_config": {"fsdp_size": 0}}, ConfigError, "fsdp_config.fsdp_size: a number of processes is 1 or more"),
    ({"fsdp_config": {"fsdp_size": "2"}}, ConfigError, "fsdp_config.fsdp_size: input should be a valid integer"),
    ({"fsdp_config": {"param_offload": 1}}, ConfigError, "fsdp_config.param_offload: input should be a valid boolean"),
    (
        {"fsdp_config": {"param_offload": True, "optimizer_offload": False}},
        ConfigError,
        "fsdp_config.optimizer_offload: False beside param_offload=True",
    ),
    (
        {"fsdp_config": {"mixed_precision": {"param_dtype": "fp16"}}},
        ConfigError,
        "fsdp_config.mixed_precision.param_dtype: fp16 needs its losses scaled",
    ),
    (
        {"fsdp_config": {"mixed_precision": {"param_dtype": "fp8"}}},
        ConfigError,
        "fsdp_config.mixed_precision.param_dtype: input should be 'bf16'",
    ),
    (
        {"fsdp_config": {"mixed_precision": {"reduce_dtype": "bf16"}}},
        ConfigError,
        "fsdp_config.mixed_precision.reduce_dtype: gradients are summed in fp32",
    ),
    (
        {"fsdp_config": {"mixed_precision": {"buffer_dtype": "bf16"}}},
        ConfigError,
        "fsdp_config.mixed_precision.buffer_dtype: unknown key",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_what_is_refused_when_it_is_made(arguments: dict[str, Any], error: type[VerlError], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}") as caught:
        FSDPPPOTrainer(**{"actor_model": "some/model", "device": "cpu", **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "weight", "message"),
    [
        (3, 1.0, "it is of type int and cannot be called"),
        (digits, float("nan"), "weight=nan must be a finite number"),
        (digits, float("inf"), "weight=inf must be a finite number"),
        (digits, "half", "weight='half' must be a finite number"),
        (digits, None, "weight=None must be a finite number"),
        (digits, True, "weight=True must be a finite number"),
        (lambda responses: [], 1.0, "must take (prompts, responses)"),
    ],
)
def test_reward_functions_that_cannot_be(fn: Any, weight: Any, message: str) -> None:
    with pytest.raises(RewardError, match=re.escape(message)):
        FSDPPPOTrainer("some/model").add_reward_fn(fn, weight=weight)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset: the data set is empty"),
        ([1], "dataset, row 0: must be a dict of named columns, found 1"),
        (["a", {"prompt": "b"}], "dataset, row 1: must be text, as row 0 is"),
        (
            {"train": []},
            "dataset: cannot train on a dict; give a name or path, a datasets.Dataset (of a DatasetDict one",
        ),
        ((x for x in "ab"), "dataset: cannot train on a generator"),
        (pa.table({"prompt": ["a"]}), "dataset, row 0: must be a dict of named columns"),
        ([{"prompt": "a", "at": {1: "b"}}], "dataset, row 0: column 'at' has keys that are not text"),
        ([{"prompt": "a", "raw": b"b"}], "dataset, row 0: column 'raw' cannot be written as JSON"),
        ([{"text": "a"}], "no known form has these columns: text"),
        ("missing.jsonl", "data.dataset=missing.jsonl: no such file"),
    ],
    ids=str,
)
def test_data_that_cannot_be(tmp_path: Path, dataset: Any, message: str) -> None:
    trainer = FSDPPPOTrainer(
        make_model(tmp_path / "model"), output_dir=tmp_path / "out", device="cpu", config={"data": {"eval_size": 0}}
    )
    with pytest.raises(DataError, match=re.escape(message)):
        trainer.fit(dataset)
    assert not (tmp_path / "out" / ".inputs").exists()


def test_what_fit_finds_out(tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model"))
    module.config._name_or_path = module.name_or_path = ""
    with pytest.raises(ModelError, match="^actor_model: LlamaForCausalLM: .* does not say where its tokenizer is"):
        FSDPPPOTrainer(module, output_dir=tmp_path / "out", device="cpu").fit(["a"])
    with pytest.raises(ModelError, match=r"^ref_model: the loaded module cannot be saved \(no room\)"):
        FSDPPPOTrainer("some/model", Peft(), output_dir=tmp_path / "out", device="cpu").fit(["a"])


def test_importing_it_loads_no_ray() -> None:
    code = "import sys\nfrom verl.trainer.ppo import FSDPPPOTrainer\nprint('ray' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Loaded modules and data in memory reach processes of their own."""
    tree, actor = short_tree(tmp_path), tmp_path / "model"
    results = []
    for nproc in (1, 2):
        trainer = FSDPPPOTrainer(
            AutoModelForCausalLM.from_pretrained(actor), config=tree, nproc=nproc, output_dir=tmp_path / f"{nproc}"
        )
        trainer.add_reward_fn(digits, weight=0.5)
        results.append(trainer.fit([f"Say {i} ." for i in range(16)]))
    assert results[0].metrics["reward"] == pytest.approx(results[1].metrics["reward"], rel=1e-5)
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert all((one[k] - two[k]).norm() <= 1e-5 * one[k].norm() for k in one)
