"""Equality of mathematical expressions: the one file that imports `math_verify`."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

from verl.core import MissingDependency, Prompt, RewardError
from verl.rewards.verifiers import MAIN_THREAD, VERIFIERS, reference_text

DEADLINE_SECONDS = 5


@VERIFIERS.register("math", needs=(MAIN_THREAD,))
def math(response: str, prompt: Prompt) -> float:
    """1 where an expression of the response equals the reference, LaTeX or plain."""
    try:
        import math_verify
    except ImportError as e:
        raise MissingDependency('reward.verifier=math needs the package math-verify: pip install "verl[math]"') from e
    target = _reference(reference_text(prompt))
    if not target:
        raise RewardError(f"prompt {prompt.id!r}: verifier math cannot read the reference {prompt.reference!r:.60}")
    answer = math_verify.parse(response, parsing_timeout=_deadline())
    return float(math_verify.verify(list(target), answer, timeout_seconds=_deadline()))


@lru_cache(maxsize=4096)
def _reference(text: str) -> tuple[Any, ...]:
    """The parsed reference; bare LaTeX is only read between dollar signs, so it is put there."""
    import math_verify

    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    return tuple(math_verify.parse(marked, parsing_timeout=_deadline()))


def _deadline() -> int:
    """Seconds for one expression. The library's clock is a signal, which only a main thread may set; 0 turns it off."""
    return DEADLINE_SECONDS if threading.current_thread() is threading.main_thread() else 0
