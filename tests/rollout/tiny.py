"""Tiny random models in Hugging Face form, and what transformers alone says about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

VOCAB = 61
CONTEXT = 64
EOS = (2, 5)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}


def save(folder: Path, family: str, seed: int = 0) -> Path:
    """A model whose next-token laws are far from uniform, so that mistakes show."""
    return save_config(folder, _config(family), seed)


def _config(family: str) -> Any:
    if family == "gpt2":  # not native; learned positions, so left padding must not shift them
        size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.35}
        return AutoConfig.for_model("gpt2", vocab_size=VOCAB, bos_token_id=1, eos_token_id=EOS[0], **size)
    return AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.35,
        bos_token_id=1,
        eos_token_id=list(EOS),
        **FAMILIES[family],
    )


def save_config(folder: Path, config: Any, seed: int) -> Path:
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config)
    # The penalty is a trap: an engine that lets the model's generation config into the law fails every comparison.
    module.generation_config = GenerationConfig(eos_token_id=list(EOS), bos_token_id=1, repetition_penalty=1.7)
    module.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", bos_token="w1").save_pretrained(folder)
    return folder


def logits(module: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """[L, V] of one full forward, fp32."""
    with torch.no_grad():
        return module(input_ids=torch.tensor([tokens])).logits[0].float()


def laws(module: Any, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float) -> torch.Tensor:
    """[len(response), V] log-probs of the law of each response token, by one full forward."""
    rows = logits(module, (*prompt, *response))[len(prompt) - 1 : -1]
    return torch.log_softmax(rows / temperature, -1)


def greedy(module: Any, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Tokens of transformers' own greedy generate, end token included."""
    out = module.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        pad_token_id=0,
        repetition_penalty=1.0,
    )
    return tuple(out[0, len(prompt) :].tolist())
