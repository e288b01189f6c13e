"""Which prompts are held out for evaluation: a pure function of what they say, not of their order or of a seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from verl.core import DataError, Prompt

LARGEST_SHARE = 4
"""At most one distinct prompt in this many is held out."""


def question_key(prompt: Prompt) -> str:
    """A hash of the whole chat, equal for equal questions on every machine."""
    text = json.dumps([dict(m) for m in prompt.messages], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hold_out(prompts: Sequence[Prompt], wanted: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, eval): `eval` has distinct questions, and `train` none of them.

    The questions with the smallest hashes are held out: the same ones for every seed and order of rows. Fewer
    than `wanted` come back where the data has fewer than 4 * wanted distinct questions.
    """
    first: dict[str, Prompt] = {}
    keys = [question_key(p) for p in prompts]
    for key, prompt in zip(keys, prompts, strict=True):
        first.setdefault(key, prompt)
    if len(first) < 2:
        raise DataError(
            "data.eval_size: the data has one distinct prompt, so none can be held out; "
            "set data.eval_size=0 or give data.eval_dataset"
        )
    count = min(wanted, max(1, len(first) // LARGEST_SHARE))
    chosen = set(sorted(first)[:count])
    held = [prompt for key, prompt in first.items() if key in chosen]
    seen = {prompt.token_ids for prompt in held}  # two questions may be one after cutting
    train = [p for key, p in zip(keys, prompts, strict=True) if key not in chosen and p.token_ids not in seen]
    if not train:
        raise DataError("data.eval_size: no prompt is left to train on; set data.eval_size=0 or give data.eval_dataset")
    return train, held


def spread(prompts: Sequence[Prompt], wanted: int) -> list[Prompt]:
    """`wanted` prompts at even distances, so that a sorted file is represented; all of them if there are fewer."""
    total = len(prompts)
    return [prompts[i * total // wanted] for i in range(wanted)] if total > wanted else list(prompts)
