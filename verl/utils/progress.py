"""The live view at the foot of a terminal: where the run is, how it goes, and what it is doing now."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from verl.utils.log_lines import Position, kl_text, seconds_text, sparkline

_KEEP = 400
_RECENT = 10


class ProgressView:
    """A rich renderable of three short lines. It holds the newest numbers; `rich.live.Live` draws it."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._at: Position | None = None
        self._planned = 1
        self._rewards: list[float] = []
        self._kl: float | None = None
        self._tokens_per_s = 0.0
        self._phases: dict[str, float] = {}
        self._step_ends: list[float] = [now()]
        self._phase: str | None = None
        self._phase_began = now()

    def start(self, planned_steps: int) -> None:
        """Training begins; planned_steps: of the whole run."""
        self._planned = planned_steps
        self._step_ends = [self._now()]

    def phase(self, name: str | None) -> None:
        """What is going on from now on; None between phases."""
        self._phase, self._phase_began = name, self._now()

    def step(
        self, at: Position, reward: float, kl: float | None, tokens_per_s: float, phases: dict[str, float]
    ) -> None:
        """A step has ended. phases: name to seconds."""
        self._at, self._kl, self._tokens_per_s, self._phases = at, kl, tokens_per_s, dict(phases)
        self._rewards = [*self._rewards, reward][-_KEEP:]
        self._step_ends = [*self._step_ends, self._now()][-_RECENT - 1 :]

    def seconds_left(self) -> float | None:
        """From the mean time of the last steps; None before the first has ended."""
        if self._at is None or len(self._step_ends) < 2:
            return None
        mean = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        since = self._now() - self._step_ends[-1]
        return max(0.0, mean * (self._planned - self._at.done) - since)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        ascii_only = not console.encoding.lower().startswith("utf")
        for line in (self._where(width, ascii_only), self._how(width, ascii_only), self._what()):
            line.no_wrap = True
            line.overflow = "ellipsis" if not ascii_only else "crop"
            yield line

    def _where(self, width: int, ascii_only: bool) -> Text:
        if self._at is None:
            return Text("getting ready", style="dim")
        left = self.seconds_left()
        words = f" {self._at}" + (f" | {seconds_text(left)} left" if left is not None else "")
        room = min(30, width - len(words) - 1)
        if room < 5:
            return Text(words[1:])
        full = round(room * self._at.done / max(1, self._planned))
        on, off = ("=", "-") if ascii_only else ("━", "╌")
        return Text.assemble((on * full, "green"), (off * (room - full), "dim"), words)

    def _how(self, width: int, ascii_only: bool) -> Text:
        if not self._rewards:
            return Text("")
        words = f" {self._rewards[-1]:.2f} | {kl_text(self._kl)} | {self._tokens_per_s:.0f} tok/s"
        room = min(40, width - len("Reward ") - len(words) - 1)
        return Text.assemble("Reward ", (sparkline(self._rewards, room, ascii_only), "cyan"), words)

    def _what(self) -> Text:
        parts = [f"{name} {seconds_text(seconds)}" for name, seconds in self._phases.items() if seconds >= 0.05]
        text = Text("last step: " + ", ".join(parts) if parts else "", style="dim")
        if self._phase is None:
            return text
        going = Text(f"{self._phase} {seconds_text(self._now() - self._phase_began)}", style="bold")
        return Text.assemble(going, " | ", text) if parts else going
