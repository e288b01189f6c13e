"""Tiny random models of every family, with a real small tokenizer, saved as Hugging Face folders."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from verl.models.compiler import CompileError, compiler

CORPUS = [
    "What is 1 + 2 ? The answer is 3 .",
    "State the final answer to the following problem: 7 + 8 =",
    "user assistant system Hello, world! Reply with the number only.",
    "0123456789 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;!?+-*/=()",
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|bos|>", "<|im_end|>", "<|im_start|>"]
PAD, BOS, EOS = 0, 1, 2

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}


def has_compiler() -> bool:
    try:
        return bool(compiler())
    except CompileError:
        return False


@lru_cache(maxsize=1)
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer.to_str()


def make_tokenizer(chat: bool = True, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 300 tokens; `bos`: it puts a BOS before every text, as Llama's does."""
    backend = Tokenizer.from_str(_backend())
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    if chat:
        tokenizer.chat_template = ("{{ bos_token }}" if bos else "") + CHAT
    return tokenizer


def make_config(family: str = "llama", tied: bool = True, vocab: int | None = None, **more: Any) -> Any:
    """A transformers config of two layers, 32 wide; `more` sets config fields."""
    size = vocab or Tokenizer.from_str(_backend()).get_vocab_size() + 8  # some tokenizer classes add a token of theirs
    values = {
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if family == "gpt2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        names |= {"max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}
        values.pop("num_key_value_heads")
        values = {names.get(k, k): v for k, v in values.items()}
    return AutoConfig.for_model(family, **(values | SHAPES.get(family, {}) | more))


def make_model(
    folder: str | Path,
    family: str = "llama",
    tied: bool = True,
    vocab: int | None = None,
    seed: int = 0,
    head: str = "lm",
    chat: bool = True,
    bos: bool = False,
    labels: int = 1,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Save a random model and its tokenizer to `folder` and return it.

    family: any `model_type` of transformers with the usual field names; the native ones are SHAPES.
    head: `lm`, or `reward` (sequence classification with `labels` outputs).
    chat: give the tokenizer a chat template. config: further config fields (rope_parameters, attention_bias ...).
    """
    folder = Path(folder)
    if head == "reward":
        config["num_labels"] = labels
    hf_config = make_config(family, tied, vocab, **config)
    torch.manual_seed(seed)
    auto = AutoModelForSequenceClassification if head == "reward" else AutoModelForCausalLM
    model = auto.from_config(hf_config).to(dtype)
    spread(model, seed)
    model.save_pretrained(folder)
    make_tokenizer(chat, bos).save_pretrained(folder)
    return folder


@torch.no_grad()
def spread(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights large enough that attention, biases and norms all matter to the output (the default init is near 0)."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator)
        param.copy_(noise * param.shape[-1] ** -0.5 if param.ndim > 1 else 1 + 0.2 * noise)
