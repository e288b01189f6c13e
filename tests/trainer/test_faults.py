"""Runs on two processes that fail: each ends in time with one line that says who, leaves no process, can be resumed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.trainer import tiny_run
from tests.trainer.fault_run import DEADLINE
from verl.trainer import run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
SECTIONS: dict[str, Any] = {
    "algorithm": {"name": "grpo"},
    "eval": {"every": 100},
    "trainer": {"num_episodes": 1, "max_steps_per_episode": STEPS, "save_every": 1},
}


@dataclass(frozen=True)
class Ended:
    """code: of the process; after: seconds from the signal; errors: lines of stderr that begin with `error:`."""

    code: int
    after: float
    errors: list[str]
    pids: list[int]
    stderr: str


def settings(folder: Path, out: str, nproc: int, **more: Any) -> dict[str, Any]:
    trainer = {**SECTIONS["trainer"], "output_dir": str(folder / out), **more.pop("trainer", {})}
    parallel = {"nproc": nproc, "threads": 1} if nproc > 1 else {}
    return {**SECTIONS, "trainer": trainer, "parallel": {**parallel, **more.pop("parallel", {})}, **more}


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def train(folder: Path, sign: str, method: str, moment: str, **more: Any) -> Ended:
    """The command on two processes, with the signal in step 3. `Ended` is what there is as soon as it has ended."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tiny_run.tree(folder, "grpo", **settings(folder, "out", 2, **more))))
    command = [sys.executable, "-m", "tests.trainer.fault_run", sign, method, "3", moment, str(config)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    now = time.time()
    said = [line.split() for line in done.stdout.splitlines()]
    pids = [int(word) for words in said if words[:1] == ["pids"] for word in words[1:]]
    struck = [float(words[1]) for words in said if words[:1] == ["struck"]]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    return Ended(done.returncode, now - struck[0] if struck else 0.0, errors, pids, done.stderr)


def goes_on(folder: Path, nproc: int, **more: Any) -> None:
    """A copy of what is left is trained to the end."""
    copy = f"out-{nproc}"
    shutil.copytree(folder / "out", folder / copy)
    result = run(tiny_run.config(folder, "grpo", **settings(folder, copy, nproc, trainer={"resume": True}, **more)))
    assert result.steps_trained == STEPS and (folder / copy / "model.safetensors").is_file()
    assert [row["step"] for row in tiny_run.metrics(folder / copy)] == list(range(STEPS + 1))


FAULTS = [
    ("SIGKILL", "advance", "before", "its process has died"),
    ("SIGKILL", "update_actor", "within", "its process has died"),
    ("SIGKILL", "publish", "before", "its process has died"),
    ("SIGSTOP", "update_actor", "before", "no answer within 10 seconds (parallel.deadline), its process is stopped"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "method", "moment", "what"), FAULTS, ids=[f"{s}-{m}-{w}" for s, m, w, _ in FAULTS])
def test_a_process_dies_or_stops(tmp_path: Path, sign: str, method: str, moment: str, what: str) -> None:
    ended = train(tmp_path, sign, method, moment)
    assert not alive(ended.pids) and len(ended.pids) == 2
    assert ended.code == 2 and 0 < ended.after < DEADLINE + 15, ended.stderr
    assert len(ended.errors) == 1 and ended.errors[0].startswith(f"error: actor, rank 1, {method}: {what}"), (
        ended.stderr
    )
    assert "Traceback" not in ended.stderr
    goes_on(tmp_path, 1)
    if method == "publish":
        goes_on(tmp_path, 2)


@pytest.mark.slow
def test_a_reward_function_raises(tmp_path: Path) -> None:
    """In step 3, after an evaluation and two steps. It runs with the controller, and the processes end all the same.
    Once it is mended, the run goes on.
    """
    bad = tmp_path / "bad.py"
    tiny_run.tree(tmp_path)
    bad.write_text(
        "calls = []\ndef fourth(prompts, responses):\n    calls.append(1)\n    if len(calls) == 4:\n"
        "        raise KeyError('no such answer')\n    return [0.5 * len(r) for r in responses]\n"
    )
    own = {"reward": {"functions": [{"path": f"{bad}:fourth"}]}}
    ended = train(tmp_path, "SIGCONT", "advance", "before", **own)
    assert not alive(ended.pids) and len(ended.pids) == 2
    assert ended.code == 2 and 0 < ended.after < 15, ended.stderr
    (error,) = ended.errors
    assert error.startswith("error: reward function 'fourth': raised KeyError: 'no such answer'"), ended.stderr
    bad.write_text(bad.read_text().replace("== 4", "== 400"))
    goes_on(tmp_path, 1, **own)
