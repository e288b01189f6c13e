"""Row forms: how a row of each known kind becomes prompts. A form is one small function, found by its columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.core import DataError, Message, Registry
from verl.data.rows import Row, cell, text_cell

TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class RawPrompt:
    """A prompt before rendering. `suffix` tells prompts of one row apart; `tools` goes to the chat template."""

    messages: tuple[Message, ...]
    reference: Any = None
    source: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] | None = None
    suffix: str = ""


Form = Callable[[Row], list[RawPrompt]]
FORMS: Registry[Form] = Registry("data.form")
"""Recognised in the order of registration: the first whose columns (`needs`) are all there."""


@FORMS.register("reasoning_gym", needs=("question", "gym"))
def gym_form(row: Row) -> list[RawPrompt]:
    """A generated entry; its reference scores responses itself."""
    return [RawPrompt(chat(row["question"]), reference=row["gym"], source="reasoning_gym")]


@FORMS.register("verl", needs=("data_source", "prompt", "reward_model"))
def verl_form(row: Row) -> list[RawPrompt]:
    """`data_source, prompt, reward_model: {ground_truth}, extra_info`: the data source chooses the verifier."""
    reward = cell(row, "reward_model")
    if not isinstance(reward, Mapping):
        raise DataError(f"column 'reward_model' must hold {{style, ground_truth}}, found {reward!r:.60}")
    extra = row.get("extra_info")
    return [
        RawPrompt(
            chat(cell(row, "prompt")),
            reference=reward.get("ground_truth"),
            source=text_cell(row, "data_source"),
            extra=extra if isinstance(extra, Mapping) else {},
            tools=tools_cell(row),
        )
    ]


@FORMS.register("preference", needs=("chosen", "rejected"))
def preference_form(row: Row) -> list[RawPrompt]:
    """`chosen, rejected`, with a `prompt` column or the prompt inside both: all before the last answer of `chosen`."""
    if row.get("prompt") is not None:
        return [RawPrompt(chat(row["prompt"]), tools=tools_cell(row))]
    chosen = cell(row, "chosen")
    messages = dialogue(chosen) if isinstance(chosen, str) else chat(chosen)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DataError(
            "column 'chosen' must end with an assistant turn after the prompt, as there is no 'prompt' column"
        )
    return [RawPrompt(messages[:-1], tools=tools_cell(row))]


@FORMS.register("alpaca_instances", needs=("instruction", "instances"))
def alpaca_instances_form(row: Row) -> list[RawPrompt]:
    """`instruction, instances: [{input, output}]`: one prompt for each instance."""
    instances = cell(row, "instances")
    if not isinstance(instances, Sequence) or not all(isinstance(i, Mapping) for i in instances):
        raise DataError(f"column 'instances' must hold a list of {{input, output}}, found {instances!r:.60}")
    return [_instruction(row, instance, suffix=f".{n}") for n, instance in enumerate(instances)]


@FORMS.register("alpaca", needs=("instruction", "output"))
def alpaca_form(row: Row) -> list[RawPrompt]:
    """`instruction, input, output`; the input may be absent or empty."""
    return [_instruction(row, row)]


def _instruction(row: Row, instance: Row, suffix: str = "") -> RawPrompt:
    text, given = text_cell(row, "instruction"), instance.get("input")
    if given not in (None, ""):
        text = f"{text}\n\n{text_cell(instance, 'input')}"
    return RawPrompt(chat(text), reference=instance.get("output"), suffix=suffix)


@FORMS.register("question_answer", needs=("question", "answer"))
def question_answer_form(row: Row) -> list[RawPrompt]:
    """`question, answer`. An answer that ends in `#### VALUE` (GSM8K) is verified; another is only the reference."""
    answer = text_cell(row, "answer")
    _, marked, value = answer.rpartition("####")
    source = "gsm8k" if marked else None
    return [RawPrompt(chat(cell(row, "question")), reference=value.strip(), source=source)]


@FORMS.register("prompt", needs=("prompt",))
def prompt_form(row: Row) -> list[RawPrompt]:
    """`prompt`: a string or chat messages; no reference."""
    return [RawPrompt(chat(cell(row, "prompt")), tools=tools_cell(row))]


def column_form(prompt_column: str, answer_column: str | None) -> Form:
    """The form of rows whose columns the user names."""

    def form(row: Row) -> list[RawPrompt]:
        reference = cell(row, answer_column) if answer_column else None
        return [RawPrompt(chat(cell(row, prompt_column)), reference=reference, tools=tools_cell(row))]

    return form


def tools_cell(row: Row) -> Sequence[Any] | None:
    """The `tools` column: a list of schemas, or that list as JSON, as data sets with one file for all tools hold it."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as e:
            raise DataError(f"column 'tools' must hold a list of schemas, found text that is not JSON ({e.msg})") from e
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, Mapping) for t in tools)):
        raise DataError(f"column 'tools' must hold a list of schemas, found {tools!r:.60}")
    return tools


def chat(value: Any) -> tuple[Message, ...]:
    """A prompt column as messages: a string is one user message; chat messages are checked and kept as they are."""
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"a prompt must be text or a list of messages, found {value!r:.60}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"a chat message must be {{'role': ..., 'content': ...}}, found {message!r:.60}")
    return tuple(value)


def dialogue(text: str) -> tuple[Message, ...]:
    """A dialogue written as `\\n\\nHuman: ...\\n\\nAssistant: ...` as messages; neighbours of one role are joined."""
    before, *parts = TURN.split(text)
    if not parts or before.strip():
        raise DataError(f"expected a dialogue that starts with '\\n\\nHuman:', found {text!r:.60}")
    messages: list[dict[str, str]] = []
    for speaker, said in zip(parts[::2], parts[1::2], strict=True):
        role, content = ROLES[speaker], said.strip()
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{content}"
        else:
            messages.append({"role": role, "content": content})
    return tuple(messages)


def choose_form(name: str, columns: Sequence[str], forced: str | None) -> tuple[str, Form]:
    """The forced form, or the first one whose columns are all there; DataError with what is there and what is known."""
    if forced is not None:
        entry = FORMS[forced]
        missing = [c for c in entry.needs if c not in columns]
        if missing:
            raise DataError(
                f"{name}: data.form={forced} needs the columns {', '.join(entry.needs)}; "
                f"{', '.join(missing)} missing, there are: {', '.join(columns)}"
            )
        return entry.name, entry.fn
    for entry in FORMS:
        if set(entry.needs) <= set(columns):
            return entry.name, entry.fn
    known = "; ".join(f"{e.name} ({', '.join(e.needs)})" for e in FORMS if e.name != "reasoning_gym")
    raise DataError(
        f"{name}: no known form has these columns: {', '.join(columns)}; "
        f"name the prompt's with data.prompt_column=NAME, or use one of the forms: {known}"
    )
