"""The critic's body and head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.models.helpers import BF16, FP32, HF, ragged_batch, rows_of
from tests.tiny import make_model
from verl.models.load import load_value_model
from verl.models.packed import PackedInput

BOTH = pytest.mark.parametrize("cfg", [FP32, HF], ids=["native", "transformers"])


@BOTH
def test_a_new_head_is_zero_and_learns(tmp_path: Path, cfg: object) -> None:
    folder = make_model(tmp_path / "m", "qwen2", tied=False)
    model = load_value_model(folder, cfg)  # type: ignore[arg-type]
    batch = ragged_batch()
    packed = PackedInput.of(batch, model.shares_prompt)
    values = model.values(packed)
    assert values.tolist() == [0.0] * batch.num_tokens
    values.sum().backward()
    states = AutoModelForCausalLM.from_pretrained(folder).eval()
    want = torch.zeros(32)
    for ids, rows in zip(batch.per_seq(batch["token_ids"]), batch.per_seq(rows_of(batch)), strict=True):
        hidden = states.model(ids[None]).last_hidden_state[0]
        want += hidden[:-1][rows[1:]].sum(0)
    torch.testing.assert_close(model.score.weight.grad, want[None].detach(), rtol=1e-4, atol=1e-4)


@BOTH
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_reward_models_head_is_taken_over(tmp_path: Path, family: str, cfg: object) -> None:
    folder = make_model(tmp_path / "m", family, head="reward")
    model = load_value_model(folder, cfg)  # type: ignore[arg-type]
    reference = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    batch = ragged_batch()
    with torch.no_grad():
        got = batch.per_seq(model.values(PackedInput.of(batch, model.shares_prompt)))
        for ids, rows, values in zip(
            batch.per_seq(batch["token_ids"]), batch.per_seq(rows_of(batch)), got, strict=True
        ):
            states = reference.score(reference.model(ids[None]).last_hidden_state[0]).squeeze(-1)
            want = torch.where(rows, torch.cat([torch.zeros(1), states[:-1]]), 0.0)
            torch.testing.assert_close(values, want, atol=1e-4, rtol=0)
    assert any(v.abs().max() > 0.1 for v in got)


def test_the_head_is_float32_whatever_the_body_is(tmp_path: Path) -> None:
    model = load_value_model(make_model(tmp_path / "m"), BF16)
    assert model.score.weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.values(PackedInput.of(ragged_batch(), True)).dtype == torch.float32


@BOTH
def test_dropout_is_off(tmp_path: Path, cfg: object) -> None:
    folder = make_model(tmp_path / "m", attention_dropout=0.5, head="reward")
    model = load_value_model(folder, cfg).train()  # type: ignore[arg-type]
    packed = PackedInput.of(ragged_batch(), model.shares_prompt)
    assert torch.equal(model.values(packed), model.values(packed))
