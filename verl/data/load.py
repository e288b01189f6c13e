"""From the data section of the configuration to prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from verl.config.data import DataConfig
from verl.core import ConfigError, DataError, Prompt
from verl.core.rng import derive_seed
from verl.data.forms import RawPrompt, choose_form, column_form
from verl.data.gym import PREFIX
from verl.data.holdout import hold_out, question_key, spread
from verl.data.rendering import Renderer, Tokenizer, last_user_text
from verl.data.report import DataReport
from verl.data.rows import Row, Rows
from verl.data.sources import open_rows
from verl.data.template_check import check_template


@dataclass(frozen=True)
class PromptData:
    """Prompts to train on and to evaluate, and what happened on the way."""

    train: list[Prompt]
    eval: list[Prompt]
    report: DataReport

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in [*self.train, *self.eval])

    @property
    def fingerprint(self) -> str:
        """A hash of the training prompts in order: a resumed run must have the same."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.train:
            digest.update(f"{prompt.id}:{prompt.token_ids}\n".encode())
        return digest.hexdigest()


def load_prompts(cfg: DataConfig, tokenizer: Tokenizer, seed: int) -> PromptData:
    """Read, recognise, render, check lengths, and hold out.

    tokenizer: a transformers tokenizer. seed: of generated data sets.
    Raises DataError for data that cannot be used and ConfigError for settings that contradict each other.
    """
    renderer = Renderer(tokenizer, cfg.system_prompt, cfg.examples, cfg.chat_template)
    report = DataReport(cfg.dataset, limit=cfg.max_prompt_tokens)
    rows = open_rows(cfg.dataset, cfg.split, cfg.size, seed)
    prompts = _prompts(rows, cfg, renderer, report)
    if cfg.eval_size == 0:
        train, held = prompts, list[Prompt]()
    elif cfg.eval_dataset is None and cfg.eval_split is None:
        train, held = hold_out(prompts, cfg.eval_size)
        report.held_out = len(prompts) - len(train)
    else:
        train, held = prompts, _separate_eval(cfg, renderer, report, seed)
        _note_overlap(train, held, report)
    if 0 < len(held) < cfg.eval_size:
        report.notes.append(
            f"{len(held)} evaluation prompts, not data.eval_size={cfg.eval_size}: there are too few distinct ones"
        )
    if renderer.uses_template:
        report.notes += [f"chat template: {finding}" for finding in check_template(tokenizer)]
    report.eval = len(held)
    report.count_train(train)
    return PromptData(train, held, report)


def _separate_eval(cfg: DataConfig, renderer: Renderer, report: DataReport, seed: int) -> list[Prompt]:
    """Evaluation prompts of a data set or split of their own."""
    name = cfg.eval_dataset or cfg.dataset
    limit = cfg.eval_size if name.startswith(PREFIX) else None
    key = "data.eval_dataset" if cfg.eval_dataset else "data.dataset"
    rows = open_rows(name, cfg.eval_split or cfg.split, limit, derive_seed(seed, "data.eval"), key)
    own = DataReport(name, limit=cfg.max_prompt_tokens)
    prompts = spread(_prompts(rows, cfg, renderer, own, "eval-"), cfg.eval_size)
    left_out = own.dropped + own.empty
    if left_out or own.truncated:
        report.notes.append(f"{key}: prompts dropped: {left_out}, cut on the left: {own.truncated}")
    return prompts


def _note_overlap(train: Sequence[Prompt], held: Sequence[Prompt], report: DataReport) -> None:
    trained = {question_key(p) for p in train}
    both = sum(question_key(p) in trained for p in held)
    if both:
        report.notes.append(f"{both} of {len(held)} evaluation prompts are also trained on")


def _raw_prompts(rows: Rows, cfg: DataConfig, report: DataReport) -> list[tuple[str, RawPrompt]]:
    """(id, prompt) of every row, by the form that the columns or the configuration say."""
    if cfg.prompt_column is None:
        if cfg.answer_column is not None:
            raise ConfigError("data.answer_column: needs data.prompt_column beside it")
        report.form, form = choose_form(rows.name, rows.columns, cfg.form)
    else:
        if cfg.form is not None:
            raise ConfigError("data.form: cannot be combined with data.prompt_column; keep one of them")
        for key, column in (("prompt_column", cfg.prompt_column), ("answer_column", cfg.answer_column)):
            if column is not None and column not in rows.columns:
                raise DataError(f"{rows.name}: no column {column!r} (data.{key}); there are: {', '.join(rows.columns)}")
        report.form, form = f"column {cfg.prompt_column}", column_form(cfg.prompt_column, cfg.answer_column)
    out = []
    for number, row in enumerate(rows.rows):
        try:
            _refuse_media(row)
            out += [(f"{number}{raw.suffix}", raw) for raw in form(row)]
        except DataError as e:
            raise DataError(f"{rows.name}, row {number}: {e}") from e
    return out


MEDIA = ("images", "image", "videos", "video", "audios", "audio")


def _refuse_media(row: Row) -> None:
    """A policy of text would answer about a picture that it never saw."""
    column = next((c for c in MEDIA if row.get(c) not in (None, "", [], {})), None)
    if column is not None:
        raise DataError(f"column {column!r} is not empty, and this version trains on text alone; leave such rows out")


def _prompts(rows: Rows, cfg: DataConfig, renderer: Renderer, report: DataReport, prefix: str = "") -> list[Prompt]:
    """Rendered prompts within the length limit, counted in `report`."""
    report.rows = len(rows.rows)
    kept: list[tuple[str, RawPrompt, str, str]] = []
    for number, raw in _raw_prompts(rows, cfg, report):
        report.prompts += 1
        try:
            text = last_user_text(raw.messages)
            if not text.strip():
                report.empty += 1
                continue
            kept.append((prefix + number, raw, text, renderer.text(raw.messages, raw.tools)))
        except DataError as e:
            raise DataError(f"{rows.name}, row {number}: {e}") from e
    if not kept:
        raise DataError(f"{rows.name}: all {report.prompts} prompts are without text")
    ids = renderer.encode([rendered for *_, rendered in kept])
    fitted = [_fit(i, cfg, renderer, report) for i in ids]
    prompts = [
        Prompt(number, token_ids, text, raw.messages, raw.reference, raw.source, raw.extra)
        for (number, raw, text, _), token_ids in zip(kept, fitted, strict=True)
        if token_ids is not None
    ]
    if not prompts:
        raise DataError(
            f"{rows.name}: every prompt is longer than data.max_prompt_tokens={cfg.max_prompt_tokens}, "
            f"the shortest is {min(map(len, ids))}; raise it, or set data.overlong=truncate_left"
        )
    return prompts


def _fit(ids: tuple[int, ...], cfg: DataConfig, renderer: Renderer, report: DataReport) -> tuple[int, ...] | None:
    """The ids if they are within the limit; else what `data.overlong` says: None, or the last ones behind the BOS."""
    limit = cfg.max_prompt_tokens
    if len(ids) <= limit:
        return ids
    if cfg.overlong == "error":
        raise DataError(
            f"a prompt has {len(ids)} tokens, more than data.max_prompt_tokens={limit}; "
            "raise it, or set data.overlong=drop or truncate_left"
        )
    if cfg.overlong == "drop":
        report.dropped += 1
        return None
    report.truncated += 1
    bos = getattr(renderer.tokenizer, "bos_token_id", None)
    head = ids[:1] if ids[0] == bos and limit > 1 else ()
    return head + ids[len(ids) - (limit - len(head)) :]
