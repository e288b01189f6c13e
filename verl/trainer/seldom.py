"""Warnings about what may happen at every step, without one at every step."""

from __future__ import annotations

from collections.abc import Callable


class Seldom:
    """Passes a message on the first time, and then at most once in `every` steps for each kind of message."""

    def __init__(self, say: Callable[[str], None], every: int = 10):
        self._say, self._every = say, every
        self._last: dict[str, int] = {}

    def __call__(self, kind: str, step: int, text: str) -> None:
        last = self._last.get(kind)
        if last is None or step - last >= self._every:
            self._last[kind] = step
            self._say(f"step {step}: {text}")
