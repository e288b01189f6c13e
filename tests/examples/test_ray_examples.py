"""The examples with several processes: what they configure, and real runs, on a Ray of their own and on a cluster."""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import make_model
from verl.algos.presets import preset_values
from verl.cli.flags import FlagTable
from verl.config import RunConfig, read_yaml, resolve
from verl.trainer.ppo import FSDPPPOTrainer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ray"


@pytest.fixture(autouse=True)
def imports_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("quickstart", None)


def parsed(script: str, *words: str) -> RunConfig:
    made = runpy.run_path(str(EXAMPLE / script))
    table = FlagTable(made["quickstart"].FLAGS, made["quickstart"].configure)
    return table.parse([*made["HERE"], *words], "")[0]


def test_what_they_configure() -> None:
    file = resolve([read_yaml(EXAMPLE / "one_machine.yaml")], preset_values())
    assert parsed("one_machine.py") == file
    assert (file.parallel.executor, file.parallel.nproc, file.parallel.address) == ("ray", 2, None)
    assert parsed("one_machine.py", "--nproc", "4").parallel.nproc == 4
    assert parsed("cluster.py").parallel == file.parallel.model_copy(update={"address": "auto"})
    assert parsed("cluster.py", "--address", "head:6379").parallel.address == "head:6379"


def test_the_python_of_its_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert len(code) == 1 and code[0].count(".fit()") == 1
    names: dict[str, Any] = {}
    exec(code[0].replace("trainer.fit()", "trainer.config"), names)
    assert isinstance(names["trainer"], FSDPPPOTrainer)
    cfg, file = names["result"], resolve([read_yaml(EXAMPLE / "one_machine.yaml")], preset_values())
    assert cfg.parallel.fsdp == -1
    assert cfg == file.model_copy(update={"parallel": file.parallel.model_copy(update={"fsdp": -1})})


def words(folder: Path) -> list[str]:
    """Two small steps of the quickstart's task on a tiny model."""
    return [
        "--actor_model_path", str(make_model(folder / "model")), "--output_dir", str(folder / "out"),
        "--max_steps_per_episode", "2", "--prompts_per_step", "4", "--samples_per_prompt", "2", "--eval_size", "4",
        "--eval_every", "0", "--max_response_tokens", "4", "--device", "cpu", "--set", "trainer.sinks=[jsonl]",
    ]  # fmt: skip


def trains(script: str, folder: Path, *more: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE / script), *words(folder), *more]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 processes on Ray" in done.stdout
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "actor/policy_loss" in r] == [1, 2]
    assert (folder / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_one_machine(tmp_path: Path) -> None:
    trains("one_machine.py", tmp_path)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a Ray cluster of one machine that is ours alone; `ray stop` would end those of others too."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # of this cluster, and of the run that joins it
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "head.log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=tmp_path)
    family: list[psutil.Process] = []
    try:
        _wait_for(process, tmp_path / "head.log")
        yield f"127.0.0.1:{port}"
        assert process.poll() is None, "a run leaves the cluster that it joined as it was"
    finally:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        for left in family:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.kill()


def _wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the head says that it runs."""
    deadline = time.monotonic() + 60
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


@pytest.mark.slow
def test_cluster(tmp_path: Path, head: str) -> None:
    trains("cluster.py", tmp_path, "--address", head)
