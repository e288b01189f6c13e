"""The loader: order of layers, strict keys with suggestions, YAML 1.2 scalars, components."""

import pytest

from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.config import RunConfig, parse_override, read_yaml, resolve
from verl.core import ConfigError

PRESETS = preset_values()


def load(*words: str) -> RunConfig:
    return resolve([parse_override(w) for w in words], PRESETS)


def test_order_is_class_then_preset_then_file_then_override() -> None:
    file = {"algorithm": {"name": "grpo", "kl": {"estimator": "k2"}}, "rollout": {"n": 4}}
    cfg = resolve([file, parse_override("rollout.n=16")], PRESETS)
    assert (cfg.algorithm.kl.place, cfg.algorithm.kl.coef, cfg.algorithm.kl.estimator) == ("loss", 0.04, "k2")
    assert cfg.rollout.n == 16 and cfg.rollout.max_response_tokens == 128


def test_a_preset_chosen_later_keeps_what_the_user_set() -> None:
    file = {"algorithm": {"name": "ppo", "kl": {"coef": 0.5}, "entropy_coef": 0.01}}
    cfg = resolve([file, parse_override("algorithm.name=grpo")], PRESETS)
    assert cfg.algorithm.kl.coef == 0.5 and cfg.algorithm.entropy_coef == 0.01 and cfg.algorithm.kl.place == "loss"


def test_components_keep_or_drop_constants_with_their_name() -> None:
    assert load("algorithm.advantage.lam=0.9").algorithm.advantage.constants == {"gamma": 1.0, "lam": 0.9}
    assert load("algorithm.advantage=grpo").algorithm.advantage.constants == {}
    assert load("algorithm.advantage=gae").algorithm.advantage.constants == {"gamma": 1.0, "lam": 0.95}


@pytest.mark.parametrize(
    "word,value",
    [
        ("actor.optim.lr=1e-6", 1e-6),
        ("actor.optim.lr=2.5e-5", 2.5e-5),
        ("trainer.resume=true", True),
        ("data.chat_template=off", "off"),
        ("algorithm.kl.place=off", "off"),
        ("trainer.run_name=no", "no"),
        ("data.size=null", None),
        ("trainer.sinks=[jsonl, wandb]", ("jsonl", "wandb")),
        ("actor.path=/a/b=c", "/a/b=c"),
    ],
)
def test_scalars_mean_what_they_say(word: str, value: object) -> None:
    node: object = load(word)
    for name in word.partition("=")[0].split("."):
        node = getattr(node, name)
    assert node == value


@pytest.mark.parametrize(
    "word,message",
    [
        ("actor.optim.learning_rate=1", r"^actor.optim.learning_rate: unknown key; keys here: lr, betas"),
        ("actor.lr=1", r"^actor.lr: unknown key \(did you mean '\w+.optim.lr'\?\)"),
        ("trainer.sed=1", r"^trainer.sed: unknown key \(did you mean 'seed'\?\)"),
        ("rollout.n=0", r"^rollout.n: .*greater than or equal to 1, got 0"),
        ("rollout.n=many", r"^rollout.n: .*got 'many'"),
        ("actor.optim.lr=.nan", r"^actor.optim.lr: "),
        ("model.dtype=fp16", r"^model.dtype: .*'bfloat16' or 'float32', got 'fp16'"),
        ("algorithm.name=pppo", r"^algorithm.name: unknown preset 'pppo' \(did you mean 'ppo'\?\)"),
        ("reward.stream=maybe", r"^reward.stream: .*valid boolean, .*or input should be 'auto', got 'maybe'"),
        ("actor.optim.betas=[0.9, x]", r"^actor.optim.betas.1: input should be a valid number"),
        ("rollout.kv_cache_gb=many", r"^rollout.kv_cache_gb: .*got 'many'"),
        (
            "rollout.sampling.temperature=1e-40",
            r"^rollout.sampling.temperature: must be 0.0001 or more, or 0 for greedy",
        ),
        ("eval.sampling.temperature=1e-40", r"^eval.sampling.temperature: must be 0.0001 or more"),
        ("novalue", r"an override is written section.key=value"),
        ("actor.optim.betas=[0.9", r"^actor.optim.betas: cannot read the value"),
    ],
)
def test_faults_are_one_line_with_their_path(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        load(word)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "word,message",
    [
        ("algorithm.advantage.lamda=1", r"^algorithm.advantage.lamda: unknown key \(did you mean 'lam'\?\)"),
        ("algorithm.policy_loss.dual_clip=0.5", r"^algorithm.policy_loss.dual_clip: .*greater than 1, got 0.5"),
        ("algorithm.policy_loss=ppo_klip", r"did you mean 'ppo_clip'"),
        ("algorithm.kl.estimator=k9", r"^algorithm.kl.estimator: unknown name 'k9'"),
        ("algorithm.aggregation=mean", r"^algorithm.aggregation: unknown mode 'mean'"),
        ("algorithm.plugins=['']", r"^algorithm.plugins: '' names nothing"),
        ("algorithm.aggregation_length=4", r"^algorithm.aggregation_length: does nothing while"),
        ("algorithm.filter.metric=verifier", r"^algorithm.filter.metric: does nothing while"),
        ("algorithm.kl.adaptive_horizon=5", r"^algorithm.kl.adaptive_horizon: does nothing while"),
        ("algorithm.kl={coef: 0, adaptive_target: 0.1}", r"^algorithm.kl.adaptive_target: does nothing while"),
        ("algorithm.kl.estimator=k3+", r"^algorithm.kl.estimator: the \+ of 'k3\+' is about gradients"),
        ("reward.overlong.factor=2", r"^reward.overlong.factor: does nothing while"),
        ("algorithm.plugins=[nowhere.py]", r"^algorithm.plugins: no such file nowhere.py"),
        ("algorithm.plugins=[no_such_module]", r"^algorithm.plugins: no module 'no_such_module'"),
        ("algorithm={name: gdpo, kl: {place: reward, coef: 0.1}}", r"^algorithm.kl.place: 'gdpo' reads the parts"),
        (
            "algorithm.rollout_correction={old_logprobs: bypass, level: token}",
            r"^algorithm.rollout_correction.level: does nothing with",
        ),
        (
            "algorithm={name: otb, rollout_correction: {old_logprobs: bypass}}",
            r"^algorithm.rollout_correction.old_logprobs: this advantage needs",
        ),
        (
            "algorithm={name: gpg, rollout_correction: {old_logprobs: bypass}}",
            r"^algorithm.rollout_correction.old_logprobs: 'gpg' has no ratio",
        ),
        (
            "algorithm={name: ppo, rollout_correction: {old_logprobs: skip}}",
            r"^algorithm.rollout_correction.old_logprobs: this algorithm reads",
        ),
        (
            "algorithm={name: grpo, rollout_correction: {reject: token}}",
            r"^algorithm.rollout_correction.reject_high: needed",
        ),
        ("algorithm={name: grpo, kl: {estimator: k1}}", r"^algorithm.kl.estimator: the gradient of k1 in the loss"),
        ("update.mini_batches=99", r"^update.mini_batches: 99 mini-batches cannot be made"),
    ],
)
def test_faults_of_the_algorithm_are_found_before_any_model(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Algorithm(load(word))


def test_filters_and_group_advantages_need_several_samples() -> None:
    for preset in ("remax", "rloo"):
        tree = {"algorithm": {"name": preset, "filter": {"constant_groups": "drop"}}, "rollout": {"n": 1}}
        with pytest.raises(ConfigError, match=r"^rollout.n: "):
            Algorithm(resolve([tree], PRESETS))


def test_files(tmp_path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("algorithm:\n  kl: {place: off}\nactor:\n  optim: {lr: 1e-5}\n")
    cfg = resolve([read_yaml(file)], PRESETS)
    assert cfg.algorithm.kl.place == "off" and cfg.actor.optim.lr == 1e-5
    for text, message in (("a: [1\nb: 2", r"c.yaml, line \d+: not valid YAML"), ("- 1", "expected sections")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_yaml(file)
    with pytest.raises(ConfigError, match="no such config file"):
        read_yaml(tmp_path / "none.yaml")


def test_the_resolved_tree_resolves_to_itself() -> None:
    cfg = load("algorithm.name=grpo", "rollout.n=3")
    assert resolve([cfg.model_dump(mode="json")], PRESETS) == cfg


@pytest.mark.parametrize("text", ["actor: {path: a}\nactor: {path: b}", "actor:\n  path: a\n  path: b"])
def test_a_key_given_twice_is_refused(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="line .*given twice"):
        read_yaml(file)


@pytest.mark.parametrize("value", [["a"], {"a": 1}, None, 5])
def test_a_preset_name_that_is_no_text(value):
    with pytest.raises(ConfigError, match=r"^algorithm.name: unknown preset"):
        resolve([{"algorithm": {"name": value}}], preset_values())


@pytest.mark.parametrize(
    "path", ["actor.path", "ref.path", "critic.path", "reward.model_path", "data.dataset", "trainer.output_dir"]
)
def test_an_empty_path_is_not_the_folder_one_stands_in(path):
    with pytest.raises(ConfigError, match=f"^{path}: .*at least 1 character"):
        resolve([parse_override(f"{path}=")], preset_values())


@pytest.mark.parametrize("betas", ["[2, 3]", "[1.0, 0.9]", "[0.9, -1]"])
def test_betas_out_of_range(betas):
    with pytest.raises(ConfigError, match=r"^actor.optim.betas.[01]: "):
        resolve([parse_override(f"actor.optim.betas={betas}")], preset_values())


def test_the_place_of_a_fault_names_fields_and_no_types() -> None:
    """Unions of plain types, of lists and of sections, in sections, lists and mappings."""
    from pydantic import BaseModel

    from verl.config.loader import check

    class Inner(BaseModel):
        size: int | list[int] = 1

    class Outer(BaseModel):
        one: Inner | None = None
        many: list[Inner] | None = None
        named: dict[str, bool | int] = {}
        either: Inner | str = ""

    for tree, place in (
        ({"one": {"size": "x"}}, "at.one.size: "),
        ({"one": {"size": [1, "x"]}}, "at.one.size"),
        ({"many": [{"size": 1}, {"size": "x"}]}, "at.many.1.size: "),
        ({"named": {"int": "x"}}, "at.named.int: "),
        ({"either": {"size": "x"}}, "at.either.size: "),
    ):
        with pytest.raises(ConfigError) as error:
            check(Outer, tree, "at")
        assert str(error.value).startswith(place), str(error.value)
        assert "[int]" not in str(error.value).partition(": ")[0]
