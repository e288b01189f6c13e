"""The log lines of a run, as pure functions of what they show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BARS = "▁▂▃▄▅▆▇█"
_BARS_ASCII = "_.-=+*#@"


@dataclass(frozen=True)
class Position:
    """Where a run is. Episodes count from 1; `step` counts the steps done in this episode, of `steps`."""

    episode: int
    episodes: int
    step: int
    steps: int

    def __str__(self) -> str:
        return f"Episode {self.episode}/{self.episodes} | Step {self.step}/{self.steps}"

    @property
    def done(self) -> int:
        """Steps done in the whole run."""
        return (self.episode - 1) * self.steps + self.step


def learning_rate(lr: float) -> str:
    """1e-6, 2.5e-5, 0.001: as people write it."""
    return re.sub(r"e([+-])0+(?=\d)", r"e\1", f"{lr:.3g}").replace("e+", "e")


def kl_text(kl: float | None) -> str:
    """Three decimals; `off` where there is no reference."""
    return "KL: off" if kl is None else f"KL: {round(kl, 3) + 0.0:.3f}"  # + 0.0: no "-0.000"


def start_line(algorithm: str, episodes: int) -> str:
    return f"Starting {algorithm.upper()} training for {episodes} episode{'' if episodes == 1 else 's'}..."


def first_line(
    at: Position, lr: float, reward: float, kl: float | None, memory_gb: float, memory_name: str = "GPU Mem"
) -> str:
    """The line of step 0: the model as it was given."""
    lr_text = f"Actor LR: {learning_rate(lr)}"
    return f"{at} | {lr_text} | Reward: {reward:.2f} | {kl_text(kl)} | {memory_name}: {memory_gb:.1f}GB"


def step_line(at: Position, reward: float, kl: float | None, tokens_per_s: float) -> str:
    return f"{at} | Reward: {reward:.2f} | {kl_text(kl)} | Throughput: {tokens_per_s:.0f} tok/s"


def final_line(at: Position, reward: float, kl: float | None, saved_to: str) -> str:
    return f"{at} | Final Reward: {reward:.2f} | {kl_text(kl)} | Saved to {saved_to}"


def evaluation_line(step: int, accuracy: float | None, reward: float, prompts: int) -> str:
    """`Evaluation at step 20: accuracy 0.47 (128 prompts)`; the reward where there is no verifier to be right by."""
    value = f"reward {reward:.2f}" if accuracy is None else f"accuracy {accuracy:.2f}"
    return f"Evaluation at step {step}: {value} ({prompts} prompt{'' if prompts == 1 else 's'})"


def seconds_text(seconds: float) -> str:
    """0.4s, 12s, 3m 20s, 2h 05m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """The last `width` values as bars between their least and their greatest; a value that is not finite is a blank."""
    bars = _BARS_ASCII if ascii_only else _BARS
    shown = list(values[-width:]) if width > 0 else []
    finite = [v for v in shown if abs(v) < float("inf")]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = high - low
    top = len(bars) - 1
    return "".join(
        " " if not abs(v) < float("inf") else bars[round((v - low) / span * top) if span > 0 else top // 2]
        for v in shown
    )
