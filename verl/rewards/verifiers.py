"""Verifiers: how a response is compared with a prompt's reference. One small function each, found by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Protocol, runtime_checkable

from verl.core import Prompt, Registry, RewardError

Verifier = Callable[[str, Prompt], float]
"""(response, prompt) -> score; 1 is right and 0 is wrong, where the task knows no more than that."""

VERIFIERS: Registry[Verifier] = Registry("reward.verifier")
MAIN_THREAD = "main_thread"
"""What a verifier `needs` that must not run in another thread."""

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")

SOURCES = {
    "openai/gsm8k": "gsm8k",
    "HuggingFaceH4/MATH-500": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "lighteval/MATH": "math",
    "math_dapo": "math",
}
"""Data sources of public parquet sets, and the verifier of each. A source that is a verifier's name needs no entry."""

SOURCE_PREFIXES = {"aime": "math", "numina_": "math"}


@runtime_checkable
class ScoresItself(Protocol):
    """A reference that knows how to score a response (a generated task's entry), and has one answer as text."""

    @property
    def answer(self) -> str: ...

    def score(self, response: str) -> float: ...


def verifier_name(source: str) -> str | None:
    """Name of the verifier for a data source, or None."""
    if source in VERIFIERS:
        return source
    if source in SOURCES:
        return SOURCES[source]
    return next((name for prefix, name in SOURCE_PREFIXES.items() if source.startswith(prefix)), None)


def reference_text(prompt: Prompt) -> str:
    """The reference as text, or a RewardError that names the prompt."""
    reference = prompt.reference
    if isinstance(reference, ScoresItself):
        reference = reference.answer
    if isinstance(reference, bool) or not isinstance(reference, (str, int, float)):
        raise RewardError(
            f"prompt {prompt.id!r}: the verifier needs a reference answer as text, found {reference!r:.60}; "
            "check the answer column (data.answer_column) or set reward.verifier"
        )
    return str(reference).strip()


@VERIFIERS.register("exact")
def exact(response: str, prompt: Prompt) -> float:
    """1 where the response is the reference, white space at the ends aside."""
    return float(response.strip() == reference_text(prompt))


@VERIFIERS.register("gsm8k")
def gsm8k(response: str, prompt: Prompt) -> float:
    """1 where the last number of the response (after `####`, if it has that) equals the last one of the reference."""
    target = last_number(reference_text(prompt))
    if target is None:
        raise RewardError(
            f"prompt {prompt.id!r}: verifier gsm8k needs a number as reference, found {prompt.reference!r:.60}"
        )
    return float(last_number(response.rpartition("####")[2]) == target)


QUICK = (exact, gsm8k)
"""Verifiers that take microseconds, so that every reference can be tried before a run."""


@VERIFIERS.register("reasoning_gym")
def reasoning_gym(response: str, prompt: Prompt) -> float:
    """The generated task's own score, 0 to 1."""
    if not isinstance(prompt.reference, ScoresItself):
        raise RewardError(
            f"prompt {prompt.id!r}: verifier reasoning_gym needs a data set reasoning_gym:TASK, "
            f"found the reference {prompt.reference!r:.60}"
        )
    return prompt.reference.score(response)


def last_number(text: str) -> Decimal | None:
    """The last decimal number of a text, thousands separators removed; None without one."""
    found = NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:  # digits of other scripts that Decimal does not read
        return None
