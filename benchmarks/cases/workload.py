"""What a rollout side is asked for, and how much arithmetic and reading that takes at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cases.questions import questions
from verl.models.config import DecoderConfig
from verl.utils.flops import model_flops


@dataclass(frozen=True)
class Work:
    """`n` responses to each prompt, `least` to `most` tokens long; exactly `most` where these are equal.

    ends: the model's end tokens.
    """

    prompts: list[list[int]]
    n: int
    least: int
    most: int
    ends: tuple[int, ...]

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def exact(self) -> bool:
        return self.least == self.most

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return max(map(len, self.prompts)) + self.most

    def short(self, tokens: int) -> Work:
        """The same prompts with fewer tokens to come: enough to warm up on."""
        most = min(self.most, tokens)
        return Work(self.prompts, self.n, min(self.least, most), most, self.ends)


@dataclass(frozen=True)
class Ran:
    """One run of a side: seconds, response lengths (prompt-major), and forward passes where the side counts them."""

    seconds: float
    lengths: list[int]
    passes: int = 0

    @property
    def rate(self) -> float:
        """Response tokens a second."""
        return sum(self.lengths) / self.seconds


def random_prompts(count: int, tokens: int, shared: int, vocab: int) -> list[list[int]]:
    """Equally long prompts of tokens drawn at random; the first `shared` are the same in all."""
    ids = torch.randint(10, vocab, (count, tokens), generator=torch.Generator().manual_seed(0))
    ids[:, :shared] = ids[0, :shared]
    return [list(row) for row in ids.tolist()]


def chat_prompts(count: int, tokenizer: Any) -> list[list[int]]:
    """Questions through the model's chat template."""
    chats = [[{"role": "user", "content": q}] for q in questions(count)]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    return [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]


def needed_flops(config: DecoderConfig, work: Work, lengths: Sequence[int]) -> float:
    """Products of one run: each prompt once whatever its number of samples, the head once a response token."""
    head = config.vocab_size * config.hidden_size
    body = config.num_params() - head * (1 if config.tied else 2)
    width = config.num_layers * config.num_heads * config.head_dim
    total = 0.0
    for i, prompt in enumerate(work.prompts):
        total += model_flops(body, len(prompt), backward=False, attention_width=width, mean_context=len(prompt) / 2)
        for length in lengths[i * work.n : (i + 1) * work.n]:
            context = len(prompt) + length / 2
            total += model_flops(body, length - 1, backward=False, attention_width=width, mean_context=context)
            total += model_flops(head, length, backward=False)
    return total


def needed_bytes(config: DecoderConfig, work: Work, ran: Ran, element: int) -> float:
    """Bytes read at least: all weights once a forward pass, and keys and values of a sequence once a token.

    element: bytes of a weight and of a cached value.
    """
    head = config.vocab_size * config.hidden_size
    weights = (config.num_params() - (0 if config.tied else head)) * element
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * element
    cached = 0
    for i, length in enumerate(ran.lengths):
        prompt = len(work.prompts[i // work.n])
        cached += sum(range(prompt + 1, prompt + length))
    return float(ran.passes * weights + token * cached)
