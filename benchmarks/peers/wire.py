"""A peer in a process of its own, with an interpreter of its own: requests and answers are lines of JSON.

The child blocks on its standard input while others are measured. Nothing but the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parent.parent
_TAIL = 2000


class Peer:
    """The parent's end. module: such as `peers.vllm_side`; python: its interpreter; env: variables beside our own."""

    def __init__(self, module: str, python: str, threads: int, env: dict[str, str] | None = None):
        self.module = module
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        self._child = subprocess.Popen(
            [python, "-m", module],
            cwd=_BENCHMARKS,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Where the child has died: exit with the end of what it said."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"error: {self.module} ended (exit {self._child.wait()}):\n{self._said()}")
        return dict(json.loads(line))

    def close(self) -> None:
        """Let the child end by itself: its input is over."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)
        self._errors.close()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-_TAIL:].strip()


class Line:
    """The child's end. What libraries print goes to standard error, so that only answers reach the parent."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """The next request; None where the parent has closed its end."""
        text = sys.stdin.readline()
        return dict(json.loads(text)) if text else None

    def reply(self, **answer: Any) -> None:
        self._replies.write(json.dumps(answer) + "\n")
        self._replies.flush()
