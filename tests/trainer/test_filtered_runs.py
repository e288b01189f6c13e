"""Real tiny runs under the filters: resumed bit for bit, never at a dead end, refused before a model loads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import tiny_run
from verl.core import ConfigError, VerlError
from verl.rewards.verifiers import VERIFIERS
from verl.trainer import run
from verl.trainer.build import build, read_inputs
from verl.trainer.evaluate import pass_metrics
from verl.utils.console import RunConsole

if "tiny_digit" not in VERIFIERS:

    @VERIFIERS.register("tiny_digit")
    def tiny_digit(response, prompt) -> float:
        """1 where the response has a digit: about half of what a random model writes."""
        return float(any(c.isdigit() for c in response))


def resampled(n: int = 2, **more):
    """Groups of two, so that many are constant; prompts retire at once when both samples pass."""
    filters = {"constant_groups": "resample", "metric": "verifier", "max_rounds": 3, "retire_pass_rate": 1.0}
    return {
        "algorithm": {"filter": filters | more},
        "reward": {"verifier": "tiny_digit"},
        "rollout": {"n": n},
        "data": {"eval_size": 2},
    }


@pytest.mark.parametrize("stop", [1, 3])
def test_resume_with_resampling_and_retired_prompts_is_the_uninterrupted_run(tmp_path, stop: int) -> None:
    more = resampled()
    whole = run(tiny_run.config(tmp_path, "grpo", **more, trainer={"output_dir": str(tmp_path / "a"), "save_every": 1}))
    rows = [r for r in tiny_run.metrics(whole.output_dir) if "reward" in r]
    assert max(r["filter/rounds"] for r in rows) > 1 and rows[-1]["filter/retired"] > rows[0]["filter/retired"] > 0
    trainer = {"output_dir": str(tmp_path / "b"), "save_every": 1}
    built = build(tiny_run.config(tmp_path, "grpo", **more, trainer=trainer), RunConsole())
    tiny_run.die_in_update(built.trainer, stop + 1)
    with pytest.raises(tiny_run.Killed):
        built.trainer.fit()
    run(tiny_run.config(tmp_path, "grpo", **more, trainer=trainer | {"resume": True}))
    assert tiny_run.metrics(tmp_path / "a") == tiny_run.metrics(tmp_path / "b")
    left, right = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert all(torch.equal(left[k], right[k]) for k in left)


def test_retired_prompts_are_not_sampled_again(tmp_path) -> None:
    cfg = tiny_run.config(
        tmp_path, "grpo", **resampled(constant_groups="keep", metric="score"), trainer={"max_steps_per_episode": 5}
    )
    built = build(cfg, RunConsole())
    retired: set[str] = set()
    for _ in range(5):
        result = built.trainer.train_step()
        seen = {t.prompt.id for t in result.trajectories}
        assert not seen & retired and len(seen) == 4
        verdicts = np.reshape(result.rewards.parts["verifier"], (-1, 2))
        ids = [t.prompt.id for t in result.trajectories[::2]]
        retired |= {i for i, v in zip(ids, verdicts, strict=True) if v.mean() >= 1.0}
    assert retired and built.trainer.source.retired == {
        i for i, p in enumerate(built.trainer.source.prompts) if p.id in retired
    }


def test_batches_are_full_and_hold_no_constant_group(tmp_path) -> None:
    cfg = tiny_run.config(tmp_path, "dapo", **resampled(n=4, max_rounds=9, retire_pass_rate=None))
    built = build(cfg, RunConsole())
    for _ in range(3):
        result = built.trainer.train_step()
        parts = dict(zip((id(t) for t in result.trajectories), result.rewards.parts["verifier"], strict=True))
        by_group: dict[int, set[float]] = {}
        for t in result.trajectories:
            by_group.setdefault(t.group_id, set()).add(parts[id(t)])
        groups = result.batch["group_id"].tolist()
        assert len(groups) == 16 and all(len(by_group[g]) == 2 for g in groups)


@pytest.mark.parametrize("preset", ["ppo", "grpo", "scale_rl", "remax", "otb", "gdpo", "clip_cov"])
def test_no_group_left_skips_the_update_and_the_run_goes_on(tmp_path, preset: str, capsys) -> None:
    (tmp_path / "flat.py").write_text("def flat(prompts, responses):\n    return [0.5] * len(responses)\n")
    cfg = tiny_run.config(
        tmp_path,
        preset,
        reward={"functions": [{"path": f"{tmp_path / 'flat.py'}:flat"}], "overlong": {"buffer": 0.0}},
        algorithm={"filter": {"constant_groups": "resample", "max_rounds": 2, "retire_pass_rate": None}},
        update={"epochs": 2, "mini_batches": 2},
        trainer={"save_every": 2},
    )
    result = run(cfg)
    assert result.steps_trained == result.steps_planned == 6
    rows = [r for r in tiny_run.metrics(result.output_dir) if "reward" in r]
    assert [r["update/skipped"] for r in rows] == [1.0] * 6 and all(r["filter/short"] == 4 for r in rows)
    before, after = load_file(tmp_path / "model" / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(before[k], after[k]) for k in after)
    out = capsys.readouterr().out
    assert out.count("no sample was left to learn from") == 1 and out.count("only 0 of 4 prompts") == 1
    run(tiny_run.config(tmp_path, preset, **_sections(cfg), trainer={"save_every": 2, "resume": True}))


def _sections(cfg):
    tree = cfg.model_dump(mode="json")
    return {name: tree[name] for name in ("reward", "algorithm", "update")}


def test_when_short_stop_ends_the_run_with_one_line(tmp_path) -> None:
    more = resampled(when_short="stop", metric="overlong")
    more["reward"] |= {"overlong": {"buffer": 0.01}, "functions": []}
    more["data"] |= {"size": 12}
    cfg = tiny_run.config(tmp_path, "grpo", **more)
    with pytest.raises(VerlError, match=r"^step 1: only \d of 4 prompts .*'overlong'.*when_short=continue$"):
        run(cfg)


@pytest.mark.parametrize("preset", ["ppo", "grpo", "remax", "otb"])
def test_all_samples_truncated_and_excluded(tmp_path, preset: str) -> None:
    """Nothing counts, so no optimizer step is made, whatever the momentum."""
    cfg = tiny_run.config(
        tmp_path,
        preset,
        algorithm={"filter": {"exclude_truncated": True}},
        rollout={"max_response_tokens": 1},
        trainer={"max_steps_per_episode": 2, "num_episodes": 1},
    )
    built = build(cfg, RunConsole())
    before = {k: v.clone() for k, v in built.trainer.roles.actor.worker.policy.state_dict().items()}
    result = built.trainer.train_step()
    assert bool(result.batch["truncated"].all()), "a random model ended within one token; choose another seed"
    assert result.metrics["update/skipped"] == 1 and result.metrics["credit/excluded"] == 1
    after = built.trainer.roles.actor.worker.policy.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_excluded_samples_do_not_move_the_update(tmp_path) -> None:
    cfg = tiny_run.config(
        tmp_path, "grpo", algorithm={"filter": {"exclude_truncated": True}}, rollout={"n": 8, "max_response_tokens": 40}
    )
    batch = build(cfg, RunConsole()).trainer.train_step().batch
    assert torch.equal(batch["excluded"], batch["truncated"]) and 0 < int(batch["excluded"].sum()) < batch.num_seqs
    assert not batch["loss_mask"][batch["excluded"][batch.seq_of_token]].any()


def test_greedy_reward_is_that_of_the_most_probable_response(tmp_path) -> None:
    built = build(tiny_run.config(tmp_path, "remax"), RunConsole())
    trainer = built.trainer
    policy = trainer.roles.actor.worker.policy
    source, step = trainer.source, 1
    want = []
    for index in source.planned(step):
        ids = list(source.prompts[index].token_ids)
        for _ in range(8):
            from verl.core.batch import Batch, cumulative
            from verl.models.packed import PackedInput

            mask = torch.zeros(len(ids) + 1, dtype=torch.bool)
            mask[-1] = True
            cols = {"token_ids": torch.tensor([*ids, 0]), "loss_mask": mask}
            packed = PackedInput.of(Batch(cumulative(torch.tensor([len(ids) + 1])), cols), False)
            with torch.no_grad():
                ids.append(int(policy.logits(policy.features(packed)[packed.pred])[0].argmax()))
            if ids[-1] in policy.source.eos_token_ids:
                break
        answer = source.worker.tokenizer.decode(ids[len(source.prompts[index].token_ids) :], skip_special_tokens=True)
        want.append(sum(c.isdigit() for c in answer) / 8)
    result = trainer.train_step()
    np.testing.assert_allclose(result.batch["greedy_reward"], np.repeat(want, 4), atol=1e-6)
    assert result.metrics["reward/greedy"] == pytest.approx(np.mean(want), abs=1e-6)
    assert len(result.trajectories) == result.batch.num_seqs == 16
    assert result.metrics["reward"] == pytest.approx(float(result.batch["reward"].mean()), abs=1e-6)


def test_reward_parts_add_up(tmp_path) -> None:
    functions = [{"path": f"{tmp_path / 'reward.py'}:digits", "weight": 0.25}]
    cfg = tiny_run.config(
        tmp_path,
        "gdpo",
        reward={"functions": functions, "verifier": "tiny_digit", "overlong": {"buffer": 0.5, "factor": 2.0}},
    )
    batch = build(cfg, RunConsole()).trainer.train_step().batch
    assert batch["reward_weights"].unique(dim=0).tolist() == [[1.0, 0.25, 1.0]]
    total = (batch["reward_parts"] * batch["reward_weights"]).sum(1)
    torch.testing.assert_close(total, batch["reward"])
    lengths = torch.tensor([int(m.sum()) for m in batch.per_seq(batch["loss_mask"])])
    torch.testing.assert_close(batch["reward_parts"][:, 2], -(lengths - 4).clamp(min=0) / 4 * 2.0)


def test_overlong_punishes_in_training_only(tmp_path) -> None:
    cfg = tiny_run.config(tmp_path, "grpo", reward={"overlong": {"buffer": 1.0}}, trainer={"num_episodes": 1})
    rows = tiny_run.metrics(run(cfg).output_dir)
    assert all("reward/overlong" in r for r in rows if "reward" in r)
    evaluated = [r for r in rows if "eval/reward" in r]
    assert evaluated and not [k for r in evaluated for k in r if k.startswith("eval/reward/overlong")]
    sample = json.loads((tmp_path / "out/samples/step-000002.jsonl").read_text().splitlines()[0])
    assert sample["parts"].keys() == {"digits"} and sample["reward"] == sample["parts"]["digits"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"filter": {"metric": "digit", "constant_groups": "drop"}},
            r"algorithm.filter.metric: .*'digit'.*did you mean 'digits'.*score, digits$",
        ),
        (
            {"filter": {"metric": "overlong", "constant_groups": "drop"}},
            r"algorithm.filter.metric: .*set one of score, digits$",
        ),
        ({"filter": {"retire_pass_rate": 0.9}}, r"algorithm.filter.retire_pass_rate: no verifier .*reward.verifier"),
        ({"filter": {"when_short": "stop"}}, r"algorithm.filter.when_short: .*constant_groups=keep"),
    ],
)
def test_filters_that_cannot_act_are_refused_before_a_model_loads(tmp_path, sections, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_inputs(tiny_run.config(tmp_path, "grpo", algorithm=sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"fp32_head": True}, "rollout": {"backend": "hf"}},
        {"model": {"fp32_head": True, "implementation": "transformers"}, "rollout": {"backend": "hf"}},
    ],
)
def test_fp32_head_is_refused_before_a_model_loads(tmp_path, sections) -> None:
    with pytest.raises(ConfigError, match=r"^model\.fp32_head: native models only"):
        read_inputs(tiny_run.config(tmp_path, "grpo", **sections))


@pytest.mark.parametrize(
    "sections,message",
    [
        (
            {"model": {"compile": "on", "dtype": "float32"}},
            r"^model\.compile=on: the kernels are for bfloat16 on a CPU",
        ),
        (
            {"model": {"compile": "on", "implementation": "transformers"}, "rollout": {"backend": "hf"}},
            r"^model\.compile=on: the kernels are for native models",
        ),
        (
            {"rollout": {"compile": "on"}, "model": {"dtype": "float32"}},
            r"^rollout\.compile=on: the kernels are for bf",
        ),
    ],
)
def test_kernels_that_cannot_be_are_refused_before_a_model_loads(tmp_path, sections, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_inputs(tiny_run.config(tmp_path, "grpo", **sections))


def test_pass_at_k_of_evaluation(tmp_path) -> None:
    """Chance by counting all subsets; n itself is there though it is no power of two."""
    from itertools import combinations

    n, correct = 6, np.array([0, 1, 4, 6])
    got = pass_metrics(correct, n).values_by_name()
    assert list(got) == [f"eval/pass@{k}" for k in (1, 2, 4, 6)]
    for k in (1, 2, 4, 6):
        want = []
        for c in correct:
            picks = list(combinations([True] * c + [False] * (n - c), k))
            want.append(sum(any(p) for p in picks) / len(picks))
        assert got[f"eval/pass@{k}"] == pytest.approx(np.mean(want), abs=1e-12)
    assert not pass_metrics(np.array([1, 0]), 1)
    cfg = tiny_run.config(
        tmp_path,
        "grpo",
        reward={"verifier": "tiny_digit"},
        eval={"n": 4, "sampling": {"temperature": 1.0}},
        trainer={"num_episodes": 1, "max_steps_per_episode": 1},
    )
    row = tiny_run.metrics(run(cfg).output_dir)[0]
    assert row["eval/pass@1"] == pytest.approx(row["eval/accuracy"])
    assert row["eval/pass@1"] <= row["eval/pass@2"] <= row["eval/pass@4"] and "eval/pass@3" not in row
    plain = tiny_run.config(tmp_path, "grpo", eval={"n": 4}, trainer={"num_episodes": 1, "max_steps_per_episode": 1})
    assert not [k for k in tiny_run.metrics(run(plain).output_dir)[0] if "pass@" in k], "no verifier, no pass@k"
