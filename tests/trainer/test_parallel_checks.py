"""Several processes: what chooses them, and what is refused before any is started."""

import importlib.util
from pathlib import Path

import pytest

from tests.tiny import make_model
from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.config import RunConfig, parse_override, resolve
from verl.core.errors import ConfigError, MissingDependency
from verl.parallel.layout import Layout, layout_of, pools_of
from verl.trainer.parallel_checks import check_cuts, check_parallel
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


@pytest.mark.parametrize(
    "word",
    ["nproc=2", "address=auto", "threads=3", "placement=split", "tp=2", "fsdp=2", "critic.tp=2", "generation_tp=1"],
)
def test_embedded_has_no_other_process(word: str) -> None:
    with pytest.raises(
        ConfigError, match=f"parallel.{word.partition('=')[0].partition('.')[0]}: .* set parallel.executor=ray"
    ):
        check(f"parallel.{word}", "parallel.executor=embedded")


def test_ray_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else there(name))
    with pytest.raises(MissingDependency, match='pip install -e ".\\[ray\\]"'):
        check("parallel.nproc=2")
    check()


def test_a_gpu_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes need a GPU each, this machine has 1"):
        check("parallel.nproc=2", device="cuda")


def test_where_a_run_is_does_not_bind_its_checkpoints() -> None:
    assert identity(config("parallel.nproc=2"), "x") == identity(config(), "x")


JUDGE = "reward.model_path=./judge"
REFUSED = {
    "tp 3 x pp 1 does not divide 4 processes; set parallel.tp": ["tp=3"],
    "parallel.critic: tp 3 x pp 1 does not divide 4": ["critic.tp=3"],
    "parallel.fsdp: 3 does not divide the 4 data parallel ranks": ["fsdp=3"],
    "parallel.ref.fsdp: 4 does not divide the 2 data": ["ref.fsdp=4", "ref.pp=2"],
    "parallel.fsdp: 0 does not": ["fsdp=0"],
    "parallel.critic.nproc: 2, but with parallel.placement=colocated": ["critic.nproc=2"],
    "parallel.ref.nproc: 2, but with parallel.placement=split": ["ref.nproc=2", "placement=split"],
    "parallel.generation_tp: 3 does not divide": ["generation_tp=3"],
    "parallel.reward.tp: unknown key.*keys here: nproc, fsdp": ["reward.tp=2", JUDGE],
    "parallel.reward.nproc: 2, but with parallel.placement=colocated": ["reward.nproc=2", JUDGE],
    "parallel.reward: there is no reward model": ["reward.fsdp=2"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_layouts_that_cannot_be(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check("parallel.nproc=4", *(w if w is JUDGE else f"parallel.{w}" for w in REFUSED[message]))


def test_who_can_be_cut() -> None:
    with pytest.raises(ConfigError, match="tp 2 and pp 1 of the actor need verl's own decoder"):
        check("parallel.nproc=2", "parallel.tp=2", "model.implementation=transformers", "rollout.backend=hf")
    with pytest.raises(ConfigError, match="rollout.backend=hf generates in one process each, not in 2"):
        check("parallel.nproc=2", "parallel.tp=2", "rollout.backend=hf")
    check("parallel.nproc=2", "parallel.fsdp=2", "model.implementation=transformers", "rollout.backend=hf")


def test_who_shares_processes() -> None:
    roles = ["actor", "ref", "critic"]
    placed = {
        p: pools_of(config(f"parallel.placement={p}").parallel, roles) for p in ("colocated", "split", "standalone")
    }
    assert placed == {
        "colocated": [roles],
        "split": [["actor", "ref"], ["critic"]],
        "standalone": [["actor"], ["ref"], ["critic"]],
    }
    assert pools_of(config("parallel.placement=split").parallel, ["actor", "ref"]) == [["actor", "ref"]]
    judged, apart = [*roles, "reward"], config("parallel.placement=standalone", "parallel.reward.nproc=1").parallel
    assert pools_of(apart, judged) == [["actor"], ["ref"], ["critic"], ["reward"]]
    assert pools_of(config("parallel.placement=standalone").parallel, judged)[0] == ["actor", "reward"]


def test_a_role_is_cut_as_the_actor_but_for_what_it_says() -> None:
    p = config("parallel.nproc=8", "parallel.tp=2", "parallel.fsdp=-1", "parallel.critic.pp=4").parallel
    assert layout_of(p, "actor") == layout_of(p, "ref") == Layout(dp=4, tp=2, fsdp=4)
    assert layout_of(p, "critic") == Layout(dp=1, pp=4, tp=2, fsdp=1)
    assert layout_of(p, "reward") == Layout(dp=8, fsdp=8), "never by tensors or stages"


WITHOUT_EFFECT = {
    "parallel.critic: this algorithm has no critic": ["critic.tp=2"],
    "parallel.placement: split puts nothing apart, as this run has only actor": ["placement=split"],
}


@pytest.mark.parametrize("message", WITHOUT_EFFECT)
def test_what_would_do_nothing(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check("algorithm.name=grpo", "parallel.nproc=2", *(f"parallel.{word}" for word in WITHOUT_EFFECT[message]))


def test_more_processes_than_any_machine_has_use_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    check("parallel.nproc=16")
    check("parallel.nproc=17", "parallel.address=auto")
    with pytest.raises(ConfigError, match="parallel.nproc: 17 processes are too many for 2 CPUs; at most 16"):
        check("parallel.nproc=17")


TOO_FINE = {  # of two layers with four heads
    r"parallel.pp: 4 stages are too many for 2 layers; set pp to 2": ["pp=4"],
    r"parallel.tp: 8 ranks are too many for 4 query heads": ["tp=8"],
    r"parallel.critic.pp: 4 stages": ["critic.pp=4"],
    r"parallel.generation_tp: 8 ranks": ["generation_tp=8"],
}


@pytest.mark.parametrize("message", TOO_FINE)
def test_cuts_that_the_model_does_not_take(tmp_path: Path, message: str) -> None:
    make_model(tmp_path / "model", "llama", tied=True)
    cfg = config(
        f"actor.path={tmp_path / 'model'}", "parallel.nproc=8", *(f"parallel.{word}" for word in TOO_FINE[message])
    )
    with pytest.raises(ConfigError, match=message):
        check_cuts(cfg, Algorithm(cfg))
