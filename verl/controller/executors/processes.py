"""Processes of this machine by their ids: ending them for sure, and seeing which are stopped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import psutil

ASKED, GONE = 1.0, 10.0
"""Seconds that processes are waited for which were told to end, and which were killed."""


def end_processes(pids: Sequence[int]) -> list[int]:
    """SIGKILL to these and to all below them, those that have ended by themselves excepted; returns when they are gone.
    The ids of those that had to be killed.
    """
    found: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [*process.children(recursive=True), process]
    _, left = psutil.wait_procs(found, timeout=ASKED)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=GONE)
    return [process.pid for process in left]


def stopped_processes(pids: Sequence[int]) -> list[int]:
    """Those of them that a signal has stopped (SIGSTOP, a debugger): they will answer nothing."""
    out = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                out.append(pid)
    return out
