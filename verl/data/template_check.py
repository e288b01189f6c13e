"""Properties of a chat template that token-exact training relies on, checked once at start."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from verl.data.rendering import Tokenizer, plain_bos
from verl.data.rows import one_line

USER = {"role": "user", "content": "one two"}
ANSWER = {"role": "assistant", "content": "three"}


def check_template(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What is unusual about the tokenizer's chat template, a sentence each; empty when nothing is.

    The prefix property: the rendering of a chat starts with the rendering of its beginning, in text and in ids. Without
    it a conversation that goes on cannot keep the ids that were sampled. One BOS at most may open a rendering.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ()
    try:
        prompt = _text(tokenizer, [USER], True)
        answered = _text(tokenizer, [USER, ANSWER], False)
        longer = _text(tokenizer, [USER, ANSWER, USER], True)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as e:
        return (f"the chat template refuses a plain chat: {one_line(e)}",)
    findings = []
    if not answered.startswith(prompt + ANSWER["content"]):
        findings.append("an answer rendered as history differs from the same answer after the generation prompt")
    elif _ids(tokenizer, answered)[: len(_ids(tokenizer, prompt))] != _ids(tokenizer, prompt):
        findings.append("the ids of a prompt change when its answer is appended")
    if not longer.startswith(answered):
        findings.append("earlier turns are rendered otherwise when the chat goes on")
    return (*findings, *_bos_findings(tokenizer, _ids(tokenizer, prompt)))


def _bos_findings(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return []
    if ids[:2] == [bos, bos]:
        return ["the chat template writes BOS twice"]
    if plain_bos(tokenizer) is not None and ids[:1] != [bos]:
        return ["the chat template writes no BOS, though the tokenizer puts one before plain text"]
    return []


def _text(tokenizer: Tokenizer, messages: list[dict[str, Any]], generate: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
