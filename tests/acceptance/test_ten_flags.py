"""The documented command with its ten flags, on local paths, for three forms of data."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.acceptance import quickstart
from tests.tiny import make_model

QUESTIONS = [f"How many letters has word {i} ?" for i in range(24)]


def ultrafeedback(folder):
    def chat(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    rows = [
        {"prompt": q, "chosen": chat(q, "5"), "rejected": chat(q, "no"), "score_chosen": 8.0, "score_rejected": 3.0}
        for q in QUESTIONS
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def alpaca(folder):
    rows = [{"instruction": q, "input": "the word" if i % 2 else "", "output": "5"} for i, q in enumerate(QUESTIONS)]
    (folder / "alpaca.json").write_text(json.dumps(rows))
    return folder / "alpaca.json"


def gsm8k(folder):
    rows = [{"question": q, "answer": f"It is {i}.\n#### {i}"} for i, q in enumerate(QUESTIONS)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder / "gsm8k.jsonl"


@pytest.mark.parametrize("form", [ultrafeedback, alpaca, gsm8k])
def test_the_command_of_the_docs(tmp_path, capsys, form) -> None:
    actor = make_model(tmp_path / "actor", family="llama", seed=1)
    reward = make_model(tmp_path / "rm", family="llama", seed=2, head="reward")
    out = tmp_path / "out"
    code = quickstart.here(
        "--actor_model_path", actor, "--ref_model_path", actor, "--reward_model_path", reward,
        "--dataset_name", form(tmp_path), "--output_dir", out,
        "--num_episodes", 2, "--max_steps_per_episode", 2,
        "--ppo_clip_coef", 0.1, "--kl_coef", 0.05, "--learning_rate", "1e-5",
        "--prompts_per_step", 4, "--samples_per_prompt", 2, "--max_response_tokens", 6, "--eval_size", 3,
        "--log_every", 1, "--device", "cpu",
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    assert re.search(r"^\[INFO\] Starting PPO training for 2 episodes\.\.\.$", said.out, re.MULTILINE)
    assert re.search(
        r"^\[INFO\] Episode 1/2 \| Step 0/2 \| Actor LR: 1e-5 \| Reward: -?\d+\.\d\d \| KL: -?\d\.\d{3} "
        r"\| GPU Mem: \d+\.\dGB$",
        said.out,
        re.MULTILINE,
    )
    assert re.search(
        rf"^\[INFO\] Episode 2/2 \| Step 2/2 \| Final Reward: .* \| Saved to {out}$", said.out, re.MULTILINE
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    assert all(r["reward"] == pytest.approx(r["reward/reward_model"]) for r in rows[1:])
    assert any((out / "tensorboard").iterdir())
    AutoModelForCausalLM.from_pretrained(out)
    check_scores(out, reward)


def check_scores(out, folder) -> None:
    """The reward in samples.jsonl is what the reward model alone says of that conversation."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    samples = [json.loads(line) for line in (out / "samples" / "step-000000.jsonl").read_text().splitlines()]
    assert len(samples) == 3
    for s in samples:
        chat = [{"role": "user", "content": s["prompt"]}, {"role": "assistant", "content": s["response"]}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            alone = float(model.bfloat16()(torch.tensor([ids])).logits[0, 0])
        assert s["reward"] == pytest.approx(alone, abs=0.05)


def test_any_other_architecture_trains_through_transformers(tmp_path, capsys) -> None:
    """GPT-NeoX is not native: `auto` takes transformers and says so; rollout by `hf`."""
    actor = make_model(tmp_path / "actor", family="gpt_neox", tied=False, seed=1)
    (tmp_path / "reward.py").write_text("def size(prompts, responses):\n    return [len(r) / 8 for r in responses]\n")
    code = quickstart.here(
        "--actor_model_path", actor, "--dataset_name", gsm8k(tmp_path), "--output_dir", tmp_path / "out",
        "--rollout", "hf", "--num_episodes", 1, "--max_steps_per_episode", 2, "--prompts_per_step", 4,
        "--samples_per_prompt", 2, "--max_response_tokens", 6, "--eval_size", 3, "--dtype", "float32",
        "--learning_rate", "1e-4", "--device", "cpu",
        "--set", f"reward.functions=[{{path: '{tmp_path}/reward.py:size'}}]",
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "transformers implementation" in said.out
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["rollout/logprob_gap_max"] < 1e-4 and rows[1]["actor/grad_norm"] > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
