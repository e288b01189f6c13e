"""A reward model: any sequence classification model with one output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl.core.errors import ModelError
from verl.core.prompt import Message, content_text
from verl.models.hf import decoder_layers
from verl.models.source import ModelSource, first_line

Conversation = tuple[Sequence[Message], str]
"""(messages of the prompt, response)."""
_BATCH_TOKENS = 8192


class Scorer(nn.Module):
    """A sequence classification module as FSDP takes it."""

    entry = "outputs"

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def layers(self) -> list[nn.Module]:
        return decoder_layers(self.module)

    def outputs(self, token_ids: Tensor, real: Tensor) -> Tensor:
        """[N, 1] of padded ids [N, L] and their attention mask."""
        logits: Tensor = self.module(input_ids=token_ids, attention_mask=real).logits
        return logits


class RewardModel:
    """Scores conversations. truncated: how many texts so far were longer than max_length and lost their beginning.

    agree: from the forward passes that these conversations need to those that all ranks make which hold the model
    together: the highest of them. Passes beyond the own ones are of a token that nobody reads.
    """

    agree: Callable[[int], int] = int

    def __init__(self, module: Any, tokenizer: Any, source: ModelSource, max_length: int):
        self.module = module.eval().requires_grad_(False)
        self.scorer = Scorer(self.module)
        self.tokenizer = tokenizer
        self.source = source
        self.max_length = min(max_length, *_limits(module, tokenizer))
        self.truncated = 0

    def render(self, messages: Sequence[Message], response: str) -> str:
        """The text to score: by the model's own chat template, or prompt and response joined where it has none."""
        if not self.tokenizer.chat_template:
            return "\n".join(map(content_text, messages)) + response
        chat = [*({**m, "content": content_text(m)} for m in messages), {"role": "assistant", "content": response}]
        try:
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception as e:  # a template is outside code
            raise ModelError(f"{self.source.name}: the chat template refuses these messages ({first_line(e)})") from e

    def encode(self, text: str) -> list[int]:
        """Token ids with the model's special tokens, one BOS at most, cut on the left to max_length."""
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        start = {self.tokenizer.bos_token_id, self.tokenizer.cls_token_id} - {None}
        while len(ids) > 1 and ids[0] == ids[1] and ids[0] in start:  # the template wrote one, the tokenizer added one
            ids = ids[1:]
        if len(ids) <= self.max_length:
            return ids
        self.truncated += 1
        head = ids[:1] if ids[0] in start else []
        return head + ids[len(ids) - self.max_length + len(head) :]

    @torch.no_grad()
    def score(self, conversations: Sequence[Conversation]) -> list[float]:
        """One score a conversation, the same that the model gives the text alone."""
        size = self.module.config.get_text_config().vocab_size
        rows = [self.encode(self.render(messages, response)) for messages, response in conversations]
        for number, ids in enumerate(rows):
            if ids and max(ids) >= size:
                raise ModelError(
                    f"{self.source.name}: its tokenizer gives token id {max(ids)}, the model has {size}; "
                    "they do not belong together"
                )
            if not ids:
                raise ModelError(f"{self.source.name}: conversation {number} is empty text; there is nothing to score")
        scores = [0.0] * len(rows)
        parts = self._parts(rows)
        passes = self.agree(len(parts))  # before the first: a rank with none would wait here, its fellows inside theirs
        for part in parts:
            for number, value in zip(part, self._forward([rows[i] for i in part]).tolist(), strict=True):
                scores[number] = value
        for _ in range(passes - len(parts)):
            self._forward([[0]])
        return scores

    def _parts(self, rows: list[list[int]]) -> list[list[int]]:
        """Row numbers of each forward pass: of similar length, and alone where the model has no padding id."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
        alone = self.module.config.get_text_config().pad_token_id is None
        parts: list[list[int]] = []
        for i in order:
            full = parts and (len(parts[-1]) + 1) * len(rows[parts[-1][0]]) > _BATCH_TOKENS
            if not parts or alone or full:
                parts.append([])
            parts[-1].append(i)
        return parts

    def _forward(self, rows: list[list[int]]) -> Tensor:
        """[N] scores. Padded on the right with the id that the model itself skips when it looks for the last token."""
        width, pad = max(map(len, rows)), self.module.config.get_text_config().pad_token_id or 0
        ids = torch.tensor([r + [pad] * (width - len(r)) for r in rows])
        real = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])
        device = self.module.device
        return self.scorer.outputs(ids.to(device), real.to(device)).float().squeeze(-1).cpu()


def _limits(module: Any, tokenizer: Any) -> list[int]:
    """Longest inputs, by the tokenizer and by the position table."""
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    return [n for n in (tokenizer.model_max_length, positions) if n]
