"""What a run prints: plain lines anywhere, with a live view below them on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from verl.utils import log_lines
from verl.utils.log_lines import Position
from verl.utils.progress import ProgressView

_REFRESH_PER_SECOND = 2  # a redraw takes a core from training, if only for a millisecond
_STYLE = {"INFO": "cyan", "WARN": "bold yellow"}


class RunConsole:
    """The lines of a run. In a file or a pipe each is plain text; on a terminal they scroll above the live view.

    stream: where to write; None is standard output. live: None shows the live view where stream is a terminal.
    NO_COLOR is obeyed.
    """

    def __init__(self, stream: TextIO | None = None, live: bool | None = None):
        self._stream = stream or sys.stdout
        self._view = ProgressView()
        self._episodes = 1
        self._live: Live | None = None
        terminal = Console(file=self._stream)
        if live if live is not None else terminal.is_terminal and not terminal.is_dumb_terminal:
            console = Console(file=self._stream, force_terminal=True, highlight=False, markup=False, emoji=False)
            self._live = Live(self._view, console=console, refresh_per_second=_REFRESH_PER_SECOND, transient=True)

    def start(self, algorithm: str, episodes: int, planned_steps: int, done: int = 0) -> None:
        """The first line; the live view begins. planned_steps: of the whole run; done: those of a resumed run."""
        self._episodes = episodes
        self._view.start(planned_steps)
        if self._live is not None:
            self._live.start()
        self.info(log_lines.start_line(algorithm, episodes))
        if done:
            self.info(f"Going on after step {done} of {planned_steps}")

    def step_zero(self, episode: int, steps: int, lr: float, reward: float, kl: float | None, memory_gb: float) -> None:
        """Before an episode's first update. episode: from 1; steps: in the episode; lr: the actor's; kl: None without a
        reference."""
        self.info(log_lines.first_line(self._at(episode, 0, steps), lr, reward, kl, memory_gb))

    def step(
        self,
        episode: int,
        step: int,
        steps: int,
        reward: float,
        kl: float | None,
        tokens_per_s: float,
        *,
        show: bool,
        metrics: Mapping[str, float],
    ) -> None:
        """Call after every step: the live view always follows; a line is printed where `show` is set.

        step: from 1, of `steps` in the episode; metrics: all of the step, `time/<phase>` among them.
        """
        at = self._at(episode, step, steps)
        phases = {name[5:]: value for name, value in metrics.items() if name.startswith("time/")}
        self._view.step(at, reward, kl, tokens_per_s, phases)
        if show:
            self.info(log_lines.step_line(at, reward, kl, tokens_per_s))

    def phase(self, name: str | None) -> None:
        """What the run does from now on; None when nothing is going on. Fits `StepClock(on_phase=...)`."""
        self._view.phase(name)

    def evaluation(self, step: int, accuracy: float | None, reward: float, prompts: int) -> None:
        """accuracy: None where no verifier judges."""
        self.info(log_lines.evaluation_line(step, accuracy, reward, prompts))

    def final(self, episode: int, steps: int, reward: float, kl: float | None, saved_to: str) -> None:
        """The last line; the live view goes."""
        self.close()
        self.info(log_lines.final_line(self._at(episode, steps, steps), reward, kl, saved_to))

    def _at(self, episode: int, step: int, steps: int) -> Position:
        return Position(episode, max(episode, self._episodes), step, steps)

    def info(self, text: str) -> None:
        self._print("INFO", text)

    def warn(self, text: str) -> None:
        self._print("WARN", text)

    def close(self) -> None:
        """Take the live view away. Safe to call twice; also call it when the run ends by an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, level: str, text: str) -> None:
        if self._live is None:
            print(f"[{level}] {text}", file=self._stream, flush=True)
        else:
            line = Text.assemble((f"[{level}]", _STYLE[level]), " ", text)
            self._live.console.print(line, soft_wrap=True)
