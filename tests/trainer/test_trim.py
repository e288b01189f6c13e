"""The heap is given back where resident memory has grown, and only then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.trainer import tiny_run
from verl.trainer import trim
from verl.trainer.build import build
from verl.trainer.trim import TrimHook
from verl.utils import heap
from verl.utils.console import RunConsole


def test_it_acts_every_fifth_step_above_what_memory_settled_at(monkeypatch) -> None:
    seen: list[int] = []
    memory = [0.0] * 4 + [1.0] + [9.0] * 4 + [1.009] + [9.0] * 4 + [1.011] + [0.0] * 5
    hook = TrimHook()
    monkeypatch.setattr(trim, "give_back", lambda: seen.append(hook.steps))
    monkeypatch.setattr(trim, "resident_memory", lambda: memory[hook.steps - 1])
    for _ in memory:
        hook.after_step(None, None)
    assert seen == [15]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_free_pages_in_the_middle_of_the_heap_go_back() -> None:
    code = (
        "from verl.utils.heap import give_back\nfrom verl.utils.monitoring import resident_memory\n"
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\n"
        "libc.free.argtypes = [ctypes.c_void_p]\n"
        "blocks = [libc.malloc(65536) for _ in range(2000)]\n"
        "for b in blocks: ctypes.memset(b, 1, 65536)\n"
        "for b in blocks[:-1]: libc.free(b)\n"
        "before = resident_memory()\ngive_back()\nprint(before - resident_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.1, done.stdout  # 2000 x 64 KiB are 0.13 GB


@pytest.mark.parametrize(("set_before", "want"), [(None, heap.PRODUCTS), ("7", "7")])
def test_a_run_limits_the_products_that_are_kept_unless_the_user_did(
    tmp_path, monkeypatch, set_before: str | None, want: str
) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    if set_before is not None:
        monkeypatch.setenv(name, set_before)
    built = build(tiny_run.config(tmp_path), RunConsole())
    assert os.environ[name] == want and any(isinstance(h, TrimHook) for h in built.trainer.hooks)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize(("threshold", "faults"), [("", (0, 1000)), ("100000", (3000, 10**9))])
def test_memory_that_was_freed_is_not_faulted_in_again_unless_the_user_set_the_allocator(
    threshold: str, faults: tuple[int, int]
) -> None:
    code = (
        "import resource, torch\nfrom verl.utils import heap\nheap.settle()\n"
        "for _ in range(3):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    x = [torch.ones(300_000) for _ in range(40)]; del x\n"  # 11,700 pages, each tensor below a large page
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    env |= {"MALLOC_TRIM_THRESHOLD_": threshold} if threshold else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert faults[0] <= int(done.stdout) <= faults[1], done.stdout
