"""Data parallel training in every layout against one process: the same numbers, in less memory a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.simulated import everything
from tests.parallel.cases import CASES, DATA, LAYOUTS, STEPS, SUBJECTS
from tests.tiny import make_model
from verl.config.models import ModelConfig
from verl.engines.train.memory import KINDS
from verl.models.load import load_policy
from verl.weights.boxes import Box, slices, whole

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FP32 = [(layout, subject) for layout, subject in CASES if SUBJECTS[subject].dtype == "float32"]
SEVERAL = [(layout, subject) for layout, subject in FP32 if LAYOUTS[layout].world > 1]
EXPORTS = [(layout, subject) for layout, subject in FP32 if SUBJECTS[subject].role == "actor"]

Seen = dict[str, list[dict[str, Any]]]
"""Layout to what each of its ranks saw, by subject."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def seen(folder: Path) -> Seen:
    """All layouts, in one start of four processes."""
    make_model(folder / "tied", "llama", tied=True)
    make_model(folder / "untied", "qwen3", tied=False, seed=1)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.parallel.ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return {n: [torch.load(folder / f"{n}-{r}.pt") for r in range(x.world)] for n, x in LAYOUTS.items()}


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative distance of two tensors."""
    return float((got.double() - want.double()).norm() / (want.double().norm() + 1e-12))


def covered(tensor: torch.Tensor, boxes: list[Box]) -> bool:
    """Whether the boxes have every element of the tensor."""
    seen = torch.zeros(tensor.shape, dtype=torch.bool)
    for box in boxes:
        seen[slices(box, whole(tensor.shape))] = True
    return bool(seen.all())


@pytest.mark.parametrize(("layout", "subject"), SEVERAL)
def test_training_is_that_of_one_process(seen: Seen, layout: str, subject: str) -> None:
    ranks, (one,) = [r[subject] for r in seen[layout]], [r[subject] for r in seen["one"]]
    counts = [len(r["index"]) for r in ranks]
    assert LAYOUTS[layout].dp == 1 or (len(set(counts)) > 1 and (LAYOUTS[layout].dp < 4 or counts[-1] == 0))
    role = SUBJECTS[subject].role
    for number in range(STEPS):
        want = one["steps"][number]
        loss = sum(r["steps"][number].get(f"{role}/loss", 0.0) for r in ranks if r["answers"])
        assert loss == pytest.approx(want[f"{role}/loss"], rel=1e-5, abs=1e-6)
        norms = {r["steps"][number][f"{role}/grad_norm"] for r in ranks}
        assert len(norms) == 1 and norms.pop() == pytest.approx(want[f"{role}/grad_norm"], rel=1e-5)
    for kind in ("grads", "weights"):
        for name, (_, want) in one[kind].items():
            parts = [r[kind][name] for r in ranks if name in r[kind]]
            assert covered(want, [box for box, _ in parts]), name
            for box, got in parts:
                error = (got.double() - want[slices(box, whole(want.shape))].double()).norm() / want.double().norm()
                assert error < 1e-5, (name, kind)


@pytest.mark.parametrize(("layout", "subject"), SEVERAL)
def test_scores_are_those_of_one_process(seen: Seen, layout: str, subject: str) -> None:
    (one,) = [r[subject]["scores"] for r in seen["one"]]
    for rank in (r[subject] for r in seen[layout]):
        for got, want in zip(rank["scores"], one, strict=True):
            for place, seq in enumerate(rank["index"]):
                torch.testing.assert_close(got[place], want[seq], atol=2e-5, rtol=1e-5)


def test_the_update_moved_the_weights(seen: Seen, folder: Path) -> None:
    before = dict(load_policy(folder / "tied", ModelConfig(dtype="float32")).named_parameters())
    after = seen["one"][0]["actor"]["weights"]
    assert min(apart(after[name][1], p.detach()) for name, p in before.items()) > 1e-3


@pytest.mark.parametrize(("layout", "subject"), CASES)
def test_a_checkpoint_goes_on_bit_for_bit_and_infinity_is_skipped_by_all(seen: Seen, layout: str, subject: str) -> None:
    for number, rank in enumerate(r[subject] for r in seen[layout]):
        assert rank["resumed"]
        assert rank["skipped"] == (1, True)
        assert rank["files"] == [f"rank-{number:05d}.safetensors", *(["counters.json"] if number == 0 else [])]


@pytest.mark.parametrize(("layout", "subject"), SEVERAL)
def test_a_checkpoint_is_the_same_from_any_layout(seen: Seen, folder: Path, layout: str, subject: str) -> None:
    """Read by one process; and what one process wrote, read by the ranks of a layout, to the bit."""
    got, want = (everything(folder / f"{n}-{subject}-state") for n in (layout, "one"))
    counters = json.loads((folder / f"{layout}-{subject}-state" / "counters.json").read_text())
    assert counters == {"steps": STEPS, "skipped_steps": 0}
    assert {key.split("/")[0] for key in want} == {"master", "exp_avg", "exp_avg_sq"}
    assert got.keys() == want.keys()
    assert max(apart(got[n], want[n]) for n in want) < 5e-5
    for rank in (r[subject]["from_one"] for r in seen[layout]):
        for name, (box, part) in rank.items():
            assert torch.equal(part, want[name][slices(box, whole(want[name].shape))])


@pytest.mark.parametrize(("layout", "subject"), EXPORTS)
def test_an_export_holds_the_whole_model(seen: Seen, folder: Path, layout: str, subject: str) -> None:
    saved = folder / f"{layout}-{subject}-export"
    cfg = ModelConfig(dtype="float32", implementation=SUBJECTS[subject].implementation)
    policy = load_policy(saved, cfg)  # type: ignore[arg-type]
    for name, p in policy.named_parameters():
        parts = [r[subject]["weights"][name] for r in seen[layout] if name in r[subject]["weights"]]
        assert all(torch.equal(got, p[slices(box, whole(p.shape))]) for box, got in parts)
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"


def test_bf16_trains_alike(seen: Seen, folder: Path) -> None:
    """Products round as in one process; what differs is the order of sums, and which of them are of bf16 numbers."""
    (one,) = [r["actor_bf16"] for r in seen["one"]]
    for layout in ("fsdp2", "fsdp4"):
        for rank in (r["actor_bf16"] for r in seen[layout]):
            for name, (_, want) in one["grads"].items():
                box, got = rank["grads"][name]
                error = (got.double() - want[slices(box, whole(want.shape))].double()).norm() / want.double().norm()
                assert error < 0.03, name
    states = [everything(folder / f"{n}-actor_bf16-state") for n in ("fsdp4", "one")]
    assert all(x.dtype == torch.float32 for state in states for x in state.values())


@pytest.mark.parametrize("subject", ["actor", "critic", "actor_transformers", "actor_bf16"])
def test_memory_of_a_rank(seen: Seen, subject: str) -> None:
    """Parameters, gradients and optimizer: at most 27 % of one process's on 4 ranks, 60 % on 2."""
    (one,) = [sum(r[subject]["bytes"].values()) for r in seen["one"]]
    rows = [f"{'layout':8}{'rank':>5}" + "".join(f"{kind:>11}" for kind in KINDS) + f"{'share':>8}"]
    for layout in [x for x, s in CASES if s == subject and x in DATA]:
        for number, rank in enumerate(r[subject]["bytes"] for r in seen[layout]):
            share = sum(rank.values()) / one
            rows.append(f"{layout:8}{number:>5}" + "".join(f"{rank[k]:>11,}" for k in KINDS) + f"{share:>8.1%}")
            assert share <= {4: 0.27, 2: 0.60, 1: 1.0}[LAYOUTS[layout].fsdp], "\n".join(rows)
    print("\n".join(rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_never_see_a_part(seen: Seen, layout: str) -> None:
    for rank in (r["actor"] for r in seen[layout]):
        assert rank["cut"] == {LAYOUTS[layout].fsdp > 1}
        assert rank["kernels_take"] == {LAYOUTS[layout].fsdp == 1}
