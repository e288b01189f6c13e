"""Data: which prompts, how they are rendered, and in which order."""

from typing import Literal

from pydantic import Field

from verl.config.base import Section


class DataConfig(Section):
    """Prompts for training and for evaluation."""

    dataset: str = Field("reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1", min_length=1)
    """Hub id (`ORG/NAME` or `ORG/NAME:CONFIG`), local file or folder (parquet, jsonl, json, csv; also .gz), or
    `reasoning_gym:TASK?key=value&key=value`.
    """
    split: str = "train"
    """Split of a hub data set or of a folder with one file per split."""
    eval_dataset: str | None = Field(None, min_length=1)
    """Evaluation prompts, as `dataset`; null: they come from `dataset`."""
    eval_split: str | None = None
    """Split that evaluation prompts come from. Null: `split` of eval_dataset, or, without one, prompts held out of
    training.
    """
    eval_size: int = Field(128, ge=0)
    """How many prompts to evaluate on; 0 turns it off. At most a quarter of the distinct prompts is held out."""
    form: str | None = None
    """Row form: `prompt`, `preference`, `alpaca`, `alpaca_instances`, `verl`, `question_answer`; null: recognised from
    the columns.
    """
    prompt_column: str | None = None
    """Column that holds the prompt, where the rows have another form than the known ones."""
    answer_column: str | None = None
    """Column that holds the reference answer, used with prompt_column."""
    system_prompt: str | None = None
    """System message of every chat; it takes the place of one that the chat already has."""
    examples: tuple[tuple[str, str], ...] = ()
    """Question and answer pairs shown as earlier turns of every chat (few-shot)."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """`auto`: use the tokenizer's chat template where it has one; `on`: require it; `off`: plain text."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longest prompt, in tokens after rendering."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """What happens to longer prompts; how many is always printed."""
    size: int | None = Field(None, ge=1)
    """Use only the first rows; for generated sets (reasoning_gym) how many to make (default 2000)."""
    shuffle: bool = True
    """A new order each episode, from (trainer.seed, episode); off keeps the file's order."""
