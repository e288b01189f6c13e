"""What the data set gives: a prompt as token ids, with what its verifier needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.core.errors import DataError

Message = Mapping[str, Any]
"""One chat message: `role`, `content`, and whatever else a chat template reads (tool calls ...)."""


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready to sample from.

    id: stable across epochs and resumes (the row's index, or the data set's own id).
    token_ids: exactly what the policy is given; rendered once by the chat template.
    text: what reward functions see as the prompt: the plain string, or the last user message of a chat.
    messages: the chat, for a reward model's own template; a plain string prompt is one user message.
    reference: whatever the verifier compares with (an answer, an entry, test cases); None where there is none.
    source: name of the verifier that scores it (`gsm8k`, `reasoning_gym`, ...); None where only models or functions do.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    messages: tuple[Message, ...] = ()
    reference: Any = None
    source: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def content_text(message: Message) -> str:
    """The text of a message whose content is a string or a list of text parts; DataError for images and the like."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content
    ):
        return "".join(part["text"] for part in content)
    raise DataError(f"a message's content must be text or text parts, found {content!r:.60}")
