"""The lines of a run, letter by letter, and the live view."""

import io
import re

import pytest
from rich.console import Console

from verl.utils import log_lines
from verl.utils.console import RunConsole
from verl.utils.log_lines import Position
from verl.utils.progress import ProgressView

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
EXPECTED = """\
[INFO] Starting PPO training for 2 episodes...
[INFO] Episode 1/2 | Step 0/100 | Actor LR: 1e-6 | Reward: 0.23 | KL: 0.012 | GPU Mem: 14.2GB
[INFO] Episode 1/2 | Step 50/100 | Reward: 0.41 | KL: 0.028 | Throughput: 1850 tok/s
[INFO] Evaluation at step 60: accuracy 0.47 (128 prompts)
[INFO] Episode 2/2 | Step 100/100 | Final Reward: 0.57 | KL: 0.035 | Saved to ./outputs/ppo-llama3-quickstart
"""


def story(console: RunConsole) -> None:
    console.start("ppo", 2, 200)
    console.step_zero(1, 100, 1e-6, 0.2345, 0.0123, 14.23)
    console.phase("rollout")
    console.step(1, 49, 100, 0.40, 0.02, 1800.0, show=False, metrics={"time/rollout": 3.0})
    console.step(1, 50, 100, 0.412, 0.0281, 1849.6, show=True, metrics={"time/rollout": 3.0, "reward": 1.0})
    console.evaluation(60, 0.469, 0.5, 128)
    console.final(2, 100, 0.57, 0.035, "./outputs/ppo-llama3-quickstart")
    console.close()


def test_lines_are_exactly_those_promised() -> None:
    out = io.StringIO()
    story(RunConsole(out))
    assert out.getvalue() == EXPECTED


@pytest.mark.parametrize("columns", ["40", "100"])
def test_live_view_does_not_garble_the_lines(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = io.StringIO()
    story(RunConsole(out, live=True))
    plain = ANSI.sub("", out.getvalue()).replace("\r", "\n").splitlines()
    assert [line for line in plain if line.startswith("[INFO]")] == EXPECTED.splitlines()
    assert "\x1b[" in out.getvalue()


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    story(RunConsole(out, live=True))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", out.getvalue())


def test_warnings_and_brackets_are_literal() -> None:
    for live in (False, True):
        out = io.StringIO()
        console = RunConsole(out, live=live)
        console.start("grpo", 1, 5)
        console.warn("[bold]x[/bold] :smile:")
        console.close()
        text = ANSI.sub("", out.getvalue())
        assert "[WARN] [bold]x[/bold] :smile:" in text
        assert "Starting GRPO training for 1 episode..." in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-6, "1e-6"), (2.5e-5, "2.5e-5"), (1e-3, "0.001"), (0.0, "0"), (1e-10, "1e-10"), (3e10, "3e10"), (0.5, "0.5")],
)
def test_learning_rate(value: float, text: str) -> None:
    assert log_lines.learning_rate(value) == text


def test_reward_without_verifier_and_kl_without_reference() -> None:
    assert log_lines.evaluation_line(0, None, 1.234, 1) == "Evaluation at step 0: reward 1.23 (1 prompt)"
    assert log_lines.step_line(Position(1, 1, 2, 3), 0.5, None, 10.0).split(" | ")[3] == "KL: off"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4s"), (12.4, "12s"), (59.7, "1m 00s"), (200, "3m 20s"), (7500, "2h 05m")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert log_lines.seconds_text(seconds) == text


def test_sparkline() -> None:
    assert log_lines.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert log_lines.sparkline([9, 9, 0, 1], 2) == "▁█"
    assert log_lines.sparkline([0.0, float("nan"), 1.0], 5) == "▁ █"
    assert log_lines.sparkline([2, 2], 5, ascii_only=True).isascii()
    assert log_lines.sparkline([], 5) == log_lines.sparkline([1.0], 0) == ""


def rendered(view: ProgressView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [10, 30, 60, 200])
def test_view_fits_its_width_and_shows_phase_and_time_left(width: int) -> None:
    now = [0.0]
    view = ProgressView(lambda: now[0])
    view.start(planned_steps=10)
    for step in (1, 2):
        now[0] += 5.0
        view.step(Position(1, 2, step, 5), 0.1 * step, 0.01, 100.0, {"rollout": 3.2, "reward": 0.001})
    view.phase("update")
    now[0] += 2.0
    lines = rendered(view, width)
    assert len(lines) == 3 and all(len(line) <= width for line in lines)
    assert view.seconds_left() == pytest.approx(5.0 * 8 - 2.0)
    if width >= 60:
        assert "Episode 1/2 | Step 2/5 | 38s left" in lines[0]
        assert "update 2.0s | last step: rollout 3.2s" in lines[2] and "reward" not in lines[2]


def test_a_kl_of_nearly_nothing_has_no_sign() -> None:
    assert log_lines.kl_text(-1e-5) == "KL: 0.000" and log_lines.kl_text(-0.0123) == "KL: -0.012"
