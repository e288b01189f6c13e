"""What is saved loads with transformers and says the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.models.helpers import BF16, FP32, HF, ragged_batch, reference_logprobs
from tests.tiny import SHAPES, make_model
from verl.core.errors import ModelError
from verl.models.export import export
from verl.models.load import load_policy
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput


def keys_of(folder: Path) -> dict[str, torch.dtype]:
    out = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            out |= {name: f.get_tensor(name).dtype for name in f.keys()}  # noqa: SIM118
    return out


@pytest.mark.parametrize("cfg", [FP32, HF], ids=["native", "transformers"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", SHAPES)
def test_round_trip(tmp_path: Path, family: str, tied: bool, cfg: object) -> None:
    original = make_model(tmp_path / "m", family, tied)
    (original / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.6}))
    policy = load_policy(original, cfg)  # type: ignore[arg-type]
    with torch.no_grad():
        for param in policy.parameters():
            param.mul_(1.01)
    saved = export(policy, tmp_path / "out" / "model")

    assert keys_of(saved) == keys_of(original)
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    batch = ragged_batch()
    with torch.no_grad():
        want, _ = token_logprobs(policy, PackedInput.of(batch, False), 1.0)
        torch.testing.assert_close(reference_logprobs(model.eval(), batch), want, atol=1e-4, rtol=0)

    config = json.loads((saved / "config.json").read_text())
    before = json.loads((original / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config == before
    assert GenerationConfig.from_pretrained(saved).eos_token_id == [2, 5]
    chat = [{"role": "user", "content": "What is 1 + 2 ?"}]
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (original, saved)]
    texts = [t.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for t in tokenizers]
    assert texts[0] == texts[1]
    assert tokenizers[0](texts[0])["input_ids"] == tokenizers[1](texts[1])["input_ids"]
    assert sorted(p.name for p in saved.parent.iterdir()) == ["model"]


def test_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    original = make_model(tmp_path / "m")
    policy = load_policy(original, BF16)
    saved = export(policy, tmp_path / "bf16")
    assert set(keys_of(saved).values()) == {torch.bfloat16}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(saved).dtype == torch.bfloat16
    masters = {name: p.float() for name, p in policy.named_parameters()}
    saved = export(policy, tmp_path / "bf16", masters)  # in place of the older export
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"
    assert set(keys_of(saved).values()) == {torch.float32}


@pytest.mark.parametrize("cfg", [FP32, HF], ids=["native", "transformers"])
def test_shards_with_an_index(tmp_path: Path, cfg: object) -> None:
    policy = load_policy(make_model(tmp_path / "m", tied=False), cfg)  # type: ignore[arg-type]
    saved = export(policy, tmp_path / "out", max_shard_bytes=20_000)
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f.name for f in files}
    reloaded = load_policy(saved, FP32).state_dict()
    for name, param in AutoModelForCausalLM.from_pretrained(saved).named_parameters():
        assert torch.equal(param, reloaded[name])
    want = {name.removeprefix("module."): p for name, p in policy.named_parameters()}
    assert all(torch.equal(reloaded[name], p) for name, p in want.items())


def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    policy = load_policy(make_model(tmp_path / "m"), FP32)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot be written"):
        export(policy, tmp_path / "file" / "model")
