"""Several processes: what chooses them, and what is refused before any is started."""

import importlib.util

import pytest

from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.config import RunConfig, parse_override, resolve
from verl.core.errors import ConfigError, MissingDependency
from verl.trainer.checks import check_parallel
from verl.trainer.resume import identity


def config(*words: str) -> RunConfig:
    return resolve([parse_override(w) for w in words], preset_values())


def check(*words: str, device: str = "cpu") -> None:
    cfg = config(*words)
    check_parallel(cfg, Algorithm(cfg), device)


def test_several_processes_are_on_ray() -> None:
    assert config().parallel.executor == "embedded"
    assert config("parallel.nproc=1").parallel.executor == "embedded"
    assert config("parallel.nproc=2").parallel.executor == "ray"
    assert config("parallel.address=auto").parallel.executor == "ray"
    assert config("parallel.nproc=2", "parallel.executor=embedded").parallel.executor == "embedded"
    check("parallel.nproc=2")


@pytest.mark.parametrize("word", ["nproc=2", "address=auto", "threads=3"])
def test_embedded_has_no_other_process(word: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.{word.partition('=')[0]}: .* set parallel.executor=ray"):
        check(f"parallel.{word}", "parallel.executor=embedded")


def test_ray_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else there(name))
    with pytest.raises(MissingDependency, match='pip install -e ".\\[ray\\]"'):
        check("parallel.nproc=2")
    check()


def test_a_loss_that_needs_the_whole_mini_batch() -> None:
    with pytest.raises(ConfigError, match="parallel.nproc: policy loss 'clip_cov' chooses tokens"):
        check("parallel.nproc=2", "algorithm.policy_loss=clip_cov")
    check("parallel.nproc=1", "parallel.executor=ray", "algorithm.policy_loss=clip_cov")


def test_a_gpu_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes need a GPU each, this machine has 1"):
        check("parallel.nproc=2", device="cuda")


def test_where_a_run_is_does_not_bind_its_checkpoints() -> None:
    assert identity(config("parallel.nproc=2"), "x") == identity(config(), "x")
