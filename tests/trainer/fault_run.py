"""`verl train` in which one process gets a signal at a moment that is certain; a test runs this as a script.

    python -m tests.trainer.fault_run SIGNAL METHOD STEP MOMENT verl-train-arguments...

MOMENT `before`: rank 1 is stopped before METHOD of training step STEP is sent to it, and gets SIGNAL when it was sent,
so the call is under way and cannot have been answered. `within`: rank 0 is stopped, so that rank 1 works and waits for
it in a collective; then rank 1 gets SIGNAL, and rank 0 goes on. The ids of all processes go to stdout, as `pids 1 2`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from verl.cli.main import main
from verl.controller.executors.ray_group import RayGroup

Send = Callable[..., Any]
DEADLINE = 10.0
"""Seconds of a call to a process that is stopped. Set with the signal: the models of a busy machine load for longer."""


def strike(send: Send, sign: signal.Signals, method: str, step: int, moment: str) -> Send:
    """RayGroup._send, which sends the signal once. A step begins where the version before it was published."""
    published = 0
    struck = False

    def sent(group: RayGroup, name: str, requests: Any) -> Any:
        nonlocal published, struck
        pids = [pid for _, _, pid in group.pool.places]
        if name == "publish" and published == 0:
            print("pids", *pids, flush=True)
        now = name == method and published == step and not struck
        published += name == "publish"
        if not now:
            return send(group, name, requests)
        struck = True
        if sign == signal.SIGSTOP:
            group.pool.cluster.deadline = DEADLINE
        held = pids[1] if moment == "before" else pids[0]
        os.kill(held, signal.SIGSTOP)
        call = send(group, name, requests)
        if moment == "within":
            time.sleep(0.5)
        print(f"struck {time.time()}", flush=True)
        os.kill(pids[1], sign)
        if moment == "within":
            os.kill(held, signal.SIGCONT)
        return call

    return sent


if __name__ == "__main__":
    sign, method, step, moment, *words = sys.argv[1:]
    RayGroup._send = strike(RayGroup._send, signal.Signals[sign], method, int(step), moment)  # type: ignore[method-assign]
    sys.exit(main(["train", *words]))
