"""Memory, FLOPs and timing against what is known."""

import re
import subprocess
import sys
import time
from contextlib import nullcontext

import psutil
import pytest
import torch

from verl.utils import flops
from verl.utils.monitoring import get_gpu_memory_usage, memory_total
from verl.utils.phase_table import PhaseTable
from verl.utils.timing import StepClock

HOST = pytest.mark.skipif(torch.cuda.is_available(), reason="host memory is reported only without a GPU")


def test_memory_formats_as_a_number() -> None:
    assert re.fullmatch(r"before rollout: \d+\.\d+ GB", f"before rollout: {get_gpu_memory_usage()} GB")


@HOST
def test_memory_is_this_process_and_follows_it() -> None:
    """In a process of its own: in a long one, freed blocks are handed out again and nothing grows."""
    code = (
        "import psutil, torch; from verl.utils.monitoring import get_gpu_memory_usage as used; "
        "before = used(); held = torch.ones(50_000_000); "
        "print(used() - before, used() - psutil.Process().memory_info().rss / 1e9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, apart = map(float, done.stdout.split())
    assert grown == pytest.approx(0.2, abs=0.03) and apart == pytest.approx(0.0, abs=0.05)


@HOST
def test_peak_covers_only_its_interval() -> None:
    """In a process of its own, for the same reason."""
    code = (
        "import torch; from verl.utils.monitoring import peak_memory, reset_peak_memory; "
        "reset_peak_memory(); start = peak_memory(); held = torch.ones(50_000_000); del held; "
        "peak = peak_memory() - start; reset_peak_memory(); print(peak, peak_memory() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak, after = map(float, done.stdout.split())
    assert peak == pytest.approx(0.2, abs=0.03) and after < 0.1


def test_total_is_at_most_the_machine() -> None:
    assert 0 < memory_total("cpu") <= psutil.virtual_memory().total / 1e9


def test_model_flops_against_a_count_of_products() -> None:
    """A two-layer model of square products: 2 operations a weight and token, twice that more for the backward."""
    width, tokens = 8, 5
    params = 2 * width * width
    by_hand = tokens * 2 * (2 * width * width)
    assert flops.model_flops(params, tokens, backward=False) == by_hand
    assert flops.model_flops(params, tokens, backward=True) == 3 * by_hand
    # scores and values: each token meets `context` keys, `width` multiply-adds for each of the two products
    context = 3
    attention = tokens * 2 * (2 * width * context)
    got = flops.model_flops(params, tokens, backward=False, attention_width=width, mean_context=context)
    assert got == by_hand + attention


def test_measured_peak_is_short_cached_and_above_a_plain_product() -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)
    start = time.perf_counter()
    peak = flops.matmul_peak("cpu", "float32")
    assert time.perf_counter() - start < 2.0  # 0.5 s on an idle machine; this one may be busy
    start = time.perf_counter()
    assert flops.matmul_peak("cpu", "float32") == peak
    assert time.perf_counter() - start < 0.01
    assert 1e8 < peak < 1e15


def test_mfu() -> None:
    assert flops.mfu(50.0, 2.0, 100.0) == 0.25
    assert flops.mfu(50.0, 0.0, 100.0) == 0.0


def test_clock_adds_up_phases_and_tells_them() -> None:
    now, told = [5.0], []
    clock = StepClock(told.append, lambda: now[0])
    for seconds in (1.0, 2.0):
        with clock("rollout"):
            now[0] += seconds
    with clock("update"):
        now[0] += 4.0
        with clock("publish"):
            now[0] += 8.0
    assert clock.seconds == {"rollout": 3.0, "update": 12.0, "publish": 8.0}
    assert told == ["rollout", None, "rollout", None, "update", "publish", "update", None]


def test_a_step_is_idle_outside_of_phases_and_where_rewards_are_waited_for() -> None:
    now = [5.0]
    clock = StepClock(now=lambda: now[0])
    for phase, seconds in (("rollout", 6.0), ("reward", 1.0), (None, 2.0), ("update", 1.0)):
        with clock(phase) if phase else nullcontext():
            now[0] += seconds
    want = {"time/rollout": 6.0, "time/reward": 1.0, "time/update": 1.0, "perf/step": 10.0, "perf/idle": 0.3}
    assert clock.metrics().values_by_name() == want
    now[0] += 4.0
    assert clock.metrics().values_by_name() == {"perf/step": 4.0, "perf/idle": 1.0}, "the next step began there"
    assert clock.metrics().values_by_name() == {"perf/step": 0.0}


def test_the_table_has_medians_shares_and_the_idle_share() -> None:
    table = PhaseTable()
    assert table.lines() == []
    for rollout, update, step in ((9.0, 1.0, 12.0), (2.0, 1.0, 3.5), (2.2, 1.0, 3.5)):
        row = {"time/rollout": rollout, "time/reward": 0.25, "time/update": update, "perf/update_actor": update / 4}
        table.add({"reward": 1.0, "perf/step": step, "perf/idle": 0.1, **row})
    assert table.lines() == [
        "Seconds of a step: median 3.50 over 3 steps, models idle 10 %",
        "  rollout      2.20   69 %",
        "  reward       0.25    4 %",
        "  update       1.00   16 %   actor 0.25",
        "  other        0.25   11 %",
    ]
    for _ in range(5):
        table.add({"perf/step": 1.0, "perf/idle": 0.0, "time/rollout": 1.0})
    assert table.lines()[0] == "Seconds of a step: median 1.00 over 8 steps, models idle 8 %"


def test_clock_counts_a_phase_that_failed() -> None:
    now = [0.0]
    clock = StepClock(now=lambda: now[0])
    with pytest.raises(KeyError), clock("reward"):
        now[0] += 3.0
        raise KeyError("x")
    assert clock.seconds == {"reward": 3.0}
