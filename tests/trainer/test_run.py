"""A whole run on a tiny model: it learns, prints the promised lines, and leaves what was promised."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer import tiny_run
from verl.core import ConfigError, DataError, ModelError
from verl.models.load import load_policy
from verl.trainer import run
from verl.trainer.build import build, read_inputs
from verl.utils.console import RunConsole


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_reward_rises(tmp_path, algorithm: str) -> None:
    cfg = tiny_run.config(
        tmp_path,
        algorithm,
        actor={"optim": {"lr": 4e-3}},
        critic={"optim": {"lr": 4e-3}},
        algorithm={"kl": {"coef": 0.001}},
        rollout={"n": 8},
        trainer={"num_episodes": 8, "max_steps_per_episode": 5},
        eval={"every": 0},
    )
    result = run(cfg)
    assert result.steps_trained == result.steps_planned == 40
    rewards = [row["reward"] for row in tiny_run.metrics(result.output_dir) if "reward" in row]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2, rewards


def test_log_lines_and_files(tmp_path, capsys) -> None:
    cfg = tiny_run.config(tmp_path)
    result = run(cfg)
    out = capsys.readouterr().out
    lines = [
        r"\[INFO\] Starting PPO training for 2 episodes\.\.\.",
        r"\[INFO\] Episode 1/2 \| Step 0/3 \| Actor LR: 0\.001 \| Reward: [\d.]+ \| KL: -?0\.000 \| GPU Mem: [\d.]+GB",
        r"\[INFO\] Episode 1/2 \| Step 2/3 \| Reward: [\d.]+ \| KL: -?[\d.]+ \| Throughput: \d+ tok/s",
        r"\[INFO\] Episode 2/2 \| Step 0/3 \| Actor LR: 0\.001 \|",
        rf"\[INFO\] Episode 2/2 \| Step 3/3 \| Final Reward: [\d.]+ \| KL: -?[\d.]+ \| "
        rf"Saved to {re.escape(str(tmp_path))}/out$",
    ]
    at = 0
    for line in lines:
        found = re.compile(line, re.MULTILINE).search(out, at)
        assert found, (line, out)
        at = found.end()
    table = re.search(r"\[INFO\] Seconds of a step: median [\d.]+ over 6 steps, models idle \d+ %\n", out)
    phases = r"(\[INFO\]   (rollout|reward|score|credit|update|publish|other) +[\d.]+ +\d+ %.*\n){7}"
    assert table and re.match(phases, out[table.end() :]), out
    assert re.search(r"  update .* critic [\d.]+, actor [\d.]+\n", out)
    rows = tiny_run.metrics(result.output_dir)
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 2, 4, 6]
    for row in rows[1:]:
        assert {"kl", "actor/grad_norm", "critic/error", "reward/digits"} <= row.keys()
    sample = json.loads((result.output_dir / "samples" / "step-000006.jsonl").read_text().splitlines()[0])
    assert sample["parts"].keys() == {"digits"} and sample["reward"] == sample["parts"]["digits"]


def test_first_step_is_on_policy(tmp_path) -> None:
    """Ratio 1 at T = 0.6: sampler, trainer and reference agree before the first update."""
    cfg = tiny_run.config(
        tmp_path, rollout={"sampling": {"temperature": 0.6}}, trainer={"num_episodes": 1, "max_steps_per_episode": 1}
    )
    row = tiny_run.metrics(run(cfg).output_dir)[-1]
    assert row["rollout/logprob_gap_max"] < 1e-4 and abs(row["kl"]) < 1e-6
    assert row["actor/clip_fraction"] == 0 and abs(row["actor/approx_kl"]) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_model_is_the_trained_one(tmp_path, dtype: str) -> None:
    """Log-probs of the saved model in transformers equal the trainer's: fp32 1e-4; bf16 0.1 (other kernels round
    differently).
    """
    cfg = tiny_run.config(tmp_path, "grpo", model={"dtype": dtype})
    built = build(cfg, RunConsole())
    built.trainer.fit()
    actor = built.trainer.roles.actor.worker
    actor.export(str(tmp_path / "saved"))
    before = load_policy(tmp_path / "model", cfg.model, "cpu").state_dict()
    batch = built.trainer.source.worker.sample(built.trainer.source.prompts[:2], 2, built.trainer.source.params, "x", 0)
    from verl.core.batch import Batch

    packed = Batch.of(batch)
    want = actor.old_logprobs(packed.select(("token_ids", "loss_mask", "group_id")))["old_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.dtype == getattr(torch, dtype) and model.config.dtype == getattr(torch, dtype)
    assert model.config.tie_word_embeddings is True
    saved = model.state_dict()
    assert any(not torch.equal(saved[k], before[k]) for k in before), "training changed nothing"
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for ids, mask, logp in zip(
        *(packed.per_seq(c) for c in (packed["token_ids"], packed["loss_mask"], want)), strict=True
    ):
        with torch.no_grad():
            z = model(ids[None]).logits[0].float().log_softmax(-1)
        got = z[:-1].gather(1, ids[1:, None]).squeeze(1)
        assert float((got - logp[1:])[mask[1:]].abs().max()) < tolerance
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template


def test_no_reference_and_no_extra_forward_without_need(tmp_path) -> None:
    built = build(tiny_run.config(tmp_path, "grpo", algorithm={"kl": {"coef": 0}}), RunConsole())
    assert built.trainer.roles.ref is None and built.trainer.roles.critic is None
    assert "old_logprobs" not in built.trainer.algorithm.needs
    result = built.trainer.train_step()
    assert "old_logprobs" not in result.batch and "kl" not in result.metrics


def test_one_forward_less_gives_the_same_step(tmp_path) -> None:
    """With one update a step, old log-probs taken from its own forward change nothing (fp32)."""
    weights = []
    for extra in (False, True):
        built = build(tiny_run.config(tmp_path, "grpo"), RunConsole())
        if extra:
            built.trainer.algorithm.needs |= {"old_logprobs"}
        built.trainer.train_step()
        weights.append(built.trainer.roles.actor.worker.policy.state_dict())
    for name, w in weights[0].items():
        torch.testing.assert_close(w, weights[1][name], atol=1e-6, rtol=1e-5)


def test_a_step_with_only_kl_lowers_kl(tmp_path) -> None:
    from tests.tiny import make_model

    other = make_model(tmp_path / "other", family="llama", seed=2)
    cfg = tiny_run.config(
        tmp_path,
        "grpo",
        ref={"path": str(other)},
        actor={"optim": {"lr": 4e-3}},
        algorithm={"kl": {"coef": 1.0, "estimator": "k3+"}, "policy_loss": {"name": "ppo_clip"}},
        reward={"functions": [{"path": f"{tmp_path}/reward.py:digits", "weight": 0.0}]},
        rollout={"n": 16},
        trainer={"num_episodes": 4, "max_steps_per_episode": 5},
        eval={"every": 0},
    )
    rows = tiny_run.metrics(run(cfg).output_dir)
    kl = [r["kl"] for r in rows if "kl" in r]
    assert np.mean(kl[-3:]) < 0.6 * np.mean(kl[:3]), kl


def test_earlier_run_is_kept_aside(tmp_path, capsys) -> None:
    cfg = tiny_run.config(tmp_path, "grpo", trainer={"num_episodes": 1, "max_steps_per_episode": 1})
    run(cfg)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    run(cfg)
    assert "holds an earlier run: moved to" in capsys.readouterr().out
    old = tmp_path / "out" / "previous-1"
    assert (old / "metrics.jsonl").is_file() and (old / "model.safetensors").is_file()
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine" and (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("name,value", [("top_p", 0.9), ("top_k", 5), ("min_tokens", 2), ("temperature", 0.0)])
def test_a_law_that_the_trainer_cannot_score_is_refused(tmp_path, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"rollout.sampling.{name}: "):
        run(tiny_run.config(tmp_path, rollout={"sampling": {name: value}}))


@pytest.mark.parametrize("role", ["ref", "critic"])
@pytest.mark.parametrize("fault", [{"vocab": 100}, {"max_position_embeddings": 16}])
def test_a_role_that_cannot_read_the_actors_tokens_is_refused_before_a_model_loads(tmp_path, role: str, fault) -> None:
    from tests.tiny import make_model

    other = make_model(tmp_path / "other", family="llama", seed=2, **fault)
    with pytest.raises(ModelError, match=rf"^{role}.path: .*(vocabulary of 100|context of 16)"):
        read_inputs(tiny_run.config(tmp_path, **{role: {"path": str(other)}}))


def test_a_prompt_as_long_as_the_context_is_refused_before_the_first_step(tmp_path) -> None:
    cfg = tiny_run.config(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"question": "a1 " * 150, "answer": "#### 1"}) + "\n")
    with pytest.raises(DataError, match="^data.max_prompt_tokens: .*set it below 256"):
        read_inputs(cfg)


@pytest.mark.parametrize("key", ["ref.path", "critic.path", "reward.model_path"])
def test_every_models_path_is_checked_by_the_dry_run(tmp_path, key: str) -> None:
    section, field = key.split(".")
    with pytest.raises(ModelError, match="no such model folder"):
        read_inputs(tiny_run.config(tmp_path, **{section: {field: str(tmp_path / "none")}}))


@pytest.mark.parametrize(
    "rollout,message",
    [
        ({"prefix_cache_gb": 1e30}, r"^rollout\.prefix_cache_gb: 1e\+30 is more than"),
        ({"prefix_cache_gb": 1e-9}, r"^rollout\.prefix_cache_gb: 1e-09 must be 0, or enough for 8 tokens"),
        ({"kv_cache_gb": 1e-300}, r"^rollout\.kv_cache_gb: 1e-300 does not hold one sequence of \d+ tokens"),
        (
            {"backend": "hf", "prefix_cache_gb": 1.0},
            r"^rollout\.prefix_cache_gb: 1.0 does nothing with rollout.backend=hf",
        ),
        ({"backend": "hf", "kv_cache_gb": 1.0}, r"^rollout\.kv_cache_gb: 1.0 does nothing with rollout.backend=hf"),
    ],
)
def test_memory_that_the_engine_would_refuse_is_refused_by_the_dry_run(tmp_path, rollout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_inputs(tiny_run.config(tmp_path, rollout=rollout))


def test_the_smallest_kv_cache_that_the_dry_run_accepts_serves_the_longest_prompt(tmp_path) -> None:
    """One function says so to both, so what passes here runs; with a longer evaluation it must be larger."""
    with pytest.raises(ConfigError, match="^rollout.kv_cache_gb") as error:
        read_inputs(tiny_run.config(tmp_path, rollout={"kv_cache_gb": 1e-9}))
    least = float(str(error.value).split("set it to ")[1].split(" or more")[0])
    cfg = tiny_run.config(tmp_path, rollout={"kv_cache_gb": least}, trainer={"num_episodes": 1})
    assert run(cfg).steps_trained == 3
    with pytest.raises(ConfigError, match="^rollout.kv_cache_gb"):
        read_inputs(tiny_run.config(tmp_path, rollout={"kv_cache_gb": least}, eval={"max_response_tokens": 64}))


def test_what_the_engine_counts_in_a_step_is_in_its_metrics(tmp_path) -> None:
    """A full cache sends sequences back, which are prefilled again; evaluation is left out."""
    with pytest.raises(ConfigError, match="^rollout.kv_cache_gb") as error:
        read_inputs(tiny_run.config(tmp_path, rollout={"max_response_tokens": 96, "kv_cache_gb": 1e-9}))
    least = float(str(error.value).split("set it to ")[1].split(" or more")[0])
    counted = {}
    for name, gb, every in (("free", None, 0), ("evaluated", None, 1), ("tight", 3 * least, 0)):
        cfg = tiny_run.config(
            tmp_path,
            rollout={"max_response_tokens": 96, "kv_cache_gb": gb},
            eval={"every": every},
            trainer={"output_dir": str(tmp_path / name), "num_episodes": 1, "max_steps_per_episode": 2},
        )
        run(cfg)
        rows = [row for row in tiny_run.metrics(tmp_path / name) if "reward" in row]
        counted[name] = [{k: row[f"rollout/{k}"] for k in ("prefilled_tokens", "preemptions")} for row in rows]
    assert counted["free"] == counted["evaluated"] and len(counted["free"]) == 2
    for free, tight in zip(counted["free"], counted["tight"], strict=True):
        assert free["preemptions"] == 0 < free["prefilled_tokens"]
        assert tight["preemptions"] > 0 and tight["prefilled_tokens"] > free["prefilled_tokens"]
