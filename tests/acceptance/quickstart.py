"""The quickstart script, in this process or in one of its own."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from verl.cli.arguments import run_main

SCRIPT = Path(__file__).parents[2] / "examples" / "ppo" / "quickstart.py"


def here(*words: object) -> int:
    """Exit code of the script's main, as its last line runs it."""
    main = runpy.run_path(str(SCRIPT))["main"]
    return run_main(lambda: main([str(w) for w in words]))


def process(*words: object, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """The script as a user starts it."""
    import os

    command = [sys.executable, str(SCRIPT), *(str(w) for w in words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **env})
