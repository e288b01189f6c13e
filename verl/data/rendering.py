"""Messages to token ids, once. What comes out is what the policy is given and trained on; nothing re-encodes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from verl.core import ConfigError, DataError, Message
from verl.core.prompt import content_text
from verl.data.rows import one_line

Tokenizer: TypeAlias = Any
"""A transformers tokenizer; this layer does not import that library."""

ENCODE_CHUNK = 1024
NAMES = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


class Renderer:
    """Renders chats for one tokenizer.

    system_prompt: takes the place of the chat's own system message. examples: earlier turns, after the system message.
    mode: `auto` uses the chat template where there is one, `on` requires it, `off` writes plain text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system_prompt: str | None = None,
        examples: Sequence[tuple[str, str]] = (),
        mode: Literal["auto", "on", "off"] = "auto",
    ):
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.examples = examples
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if mode == "on" and not has_template:
            raise ConfigError("data.chat_template=on, but the tokenizer has no chat template; use auto or off")
        self.uses_template = has_template and mode != "off"
        self._bos = None if self.uses_template else plain_bos(tokenizer)

    def messages(self, chat: Sequence[Message]) -> list[dict[str, Any]]:
        """The chat with the system prompt and the examples put in."""
        own = [_plain(m) for m in chat]
        head = own[:1] if own and own[0]["role"] == "system" else []
        rest = own[len(head) :]
        if self.system_prompt is not None:
            head = [{"role": "system", "content": self.system_prompt}]
        for question, answer in self.examples:
            head += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return head + rest

    def text(self, chat: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The chat as one string that ends where the response starts."""
        messages = self.messages(chat)
        if not self.uses_template:
            return plain_text(messages)
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
            )
        except Exception as e:  # a template is outside code: it may divide by zero
            raise DataError(
                f"the chat template refuses this prompt ({one_line(e)}); "
                "change data.system_prompt or data.examples, or set data.chat_template=off"
            ) from e
        return str(text)

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of rendered texts. A template writes its own special tokens; plain text gets the model's BOS."""
        out: list[tuple[int, ...]] = []
        for start in range(0, len(texts), ENCODE_CHUNK):
            chunk = list(texts[start : start + ENCODE_CHUNK])
            out += [tuple(ids) for ids in self.tokenizer(chunk, add_special_tokens=False)["input_ids"]]
        if self._bos is None:
            return out
        return [ids if ids[:1] == (self._bos,) else (self._bos, *ids) for ids in out]


def _plain(message: Message) -> dict[str, Any]:
    """The message with text parts joined: a template for text would write a list as Python does. Null is left out."""
    content = message.get("content")
    joined = {} if content is None or isinstance(content, str) else {"content": content_text(message)}
    return {key: value for key, value in message.items() if key != "content" or value is not None} | joined


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Sequence[Any] | None = None, **options: Any
) -> tuple[int, ...]:
    """Ids of one chat; `options` as for Renderer."""
    renderer = Renderer(tokenizer, **options)
    return renderer.encode([renderer.text(messages, tools)])[0]


def plain_bos(tokenizer: Tokenizer) -> int | None:
    """The BOS id if this tokenizer puts one before plain text, else None."""
    bos: int | None = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and list(tokenizer("a")["input_ids"][:1]) == [bos] else None


def plain_text(messages: Sequence[Message]) -> str:
    """Messages without a chat template: one user message as it is; longer chats as `User:` / `Assistant:` turns."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return content_text(messages[0])
    parts = []
    for message in messages:
        name = NAMES.get(message["role"])
        parts.append(f"{name}: {content_text(message)}" if name else content_text(message))
    return "\n\n".join([*parts, "Assistant:"])


def last_user_text(messages: Sequence[Message]) -> str:
    """What reward functions see as the prompt: the last user message, or the last message where no user speaks."""
    said = [m for m in messages if m["role"] == "user"] or list(messages)
    return content_text(said[-1])
