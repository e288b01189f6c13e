"""Parts of tensors on disk: what is read under any boxes is what was written under any others, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from tests.checkpoint.simulated import everything, save_as_ranks
from verl.checkpoint import sharded
from verl.checkpoint.sharded import Piece
from verl.core.errors import CheckpointError
from verl.weights.boxes import Box, slices, whole

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def piece(full: Tensor, box: Box) -> Piece:
    """A part of `full` as a rank holds it: a copy, with gaps between its rows."""
    part = full[slices(box, whole(full.shape))]
    if part.ndim:
        part = torch.stack([part, torch.zeros_like(part)], dim=-1)[..., 0]
    return Piece(part, box, tuple(full.shape))


def empty(full: Tensor, box: Box) -> Piece:
    """To be filled."""
    return Piece(torch.full_like(full[slices(box, whole(full.shape))], 77), box, tuple(full.shape))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that are the whole together, some of them maybe empty."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(*box[dim]))
        for part in ((box[dim][0], at), (at, box[dim][1])):
            boxes.append((*box[:dim], part, *box[dim + 1 :]))
    return boxes


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Tensor], list[list[Box | None]], list[list[Box]]]:
    """Tensors; the box of each that each rank saves, replicas among them; and the boxes that are read."""
    world = draw(st.integers(1, 7))
    tensors, saved, read = [], [], []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        tensors.append(torch.randn(shape).mul(100).to(DTYPES[number]))
        boxes = draw(cuts(shape))
        boxes = boxes if len(boxes) <= world else [whole(shape)]
        order = draw(st.permutations(range(world)))
        more = draw(st.lists(st.sampled_from([None, *boxes]), min_size=world, max_size=world))
        held = [*boxes, *more][:world]
        saved.append([held[rank] for rank in order])
        read.append(draw(cuts(shape)))
    return tensors, saved, read


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_any_boxes_from_any_boxes(case: tuple[list[Tensor], list[list[Box | None]], list[list[Box]]]) -> None:
    tensors, saved, read = case
    ranks: list[dict[str, Piece]] = [{} for _ in saved[0]]
    for name, (full, boxes) in enumerate(zip(tensors, saved, strict=True)):
        for rank, box in enumerate(boxes):
            if box is not None:
                ranks[rank][str(name)] = piece(full, box)
    with TemporaryDirectory() as folder:
        save_as_ranks(Path(folder), ranks)
        written = sum(f.stat().st_size for f in Path(folder).iterdir())
        assert written < sum(t.nbytes for t in tensors) + 1200 * len(ranks), "replicas are written once"
        for name, (full, boxes) in enumerate(zip(tensors, read, strict=True)):
            for box in boxes:
                got = empty(full, box)
                sharded.load(folder, {str(name): got})
                assert torch.equal(got.tensor, full[slices(box, whole(full.shape))])


def test_four_processes_save_and_two_and_one_load(tmp_path: Path) -> None:
    """See `ranks.py`, whose processes compare."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.checkpoint.ranks", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    files = sorted((tmp_path / "saved").iterdir())
    assert [f.name for f in files] == [f"rank-0000{r}.safetensors" for r in range(4)]


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    full = torch.arange(24.0).view(4, 6)
    rows = [piece(full, ((0, 2), (0, 6))), piece(full, ((2, 4), (0, 6)))]
    scalar = Piece(torch.tensor(3, dtype=torch.int64), (), ())
    save_as_ranks(tmp_path, [{"w": rows[0], "n": scalar}, {"w": rows[1], "n": scalar}])
    return {"folder": tmp_path, "full": full}


def test_it_is_plain_safetensors(saved: dict[str, Any]) -> None:
    shapes, count = [], 0
    for file in sorted(saved["folder"].iterdir()):
        assert file.suffix == ".safetensors"
        with safe_open(file, "pt") as f:
            shapes.append(tuple(f.get_slice("w").get_shape()))
            count += "n" in f.keys()  # noqa: SIM118
    assert shapes == [(2, 6), (2, 6)] and count == 1
    assert everything(saved["folder"])["n"] == 3


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("v", torch.zeros(4, 6), "v is missing"),
        ("w", torch.zeros(4, 7), r"w is \(4, 6\) of torch.float32, the model's is \(4, 7\)"),
        ("w", torch.zeros(24), r"w is \(4, 6\)"),
        ("w", torch.zeros(4, 6, dtype=torch.bfloat16), "the model's is .* of torch.bfloat16"),
        ("n", torch.zeros(1, dtype=torch.int64), r"n is \(\)"),
    ],
)
def test_what_is_not_there(saved: dict[str, Any], name: str, other: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        sharded.load(saved["folder"], {name: Piece(other, whole(other.shape), tuple(other.shape))})


def test_an_empty_piece_is_checked_as_well(saved: dict[str, Any]) -> None:
    sharded.load(saved["folder"], {"w": Piece(torch.zeros(0), ((4, 4), (0, 6)), (4, 6))})
    with pytest.raises(CheckpointError, match="w is"):
        sharded.load(saved["folder"], {"w": Piece(torch.zeros(0), ((5, 5), (0, 6)), (5, 6))})


def test_complete_means_all_of_it(saved: dict[str, Any]) -> None:
    w = empty(saved["full"], whole((4, 6)))
    sharded.load(saved["folder"], {"w": w})
    assert torch.equal(w.tensor, saved["full"])
    with pytest.raises(CheckpointError, match="1 tensors that the model has not, such as n"):
        sharded.load(saved["folder"], {"w": w}, complete=True)


def test_a_part_that_is_lost_is_found(saved: dict[str, Any]) -> None:
    (saved["folder"] / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="w is not whole"):
        sharded.load(saved["folder"], {"w": empty(saved["full"], whole((4, 6)))})
    below = empty(saved["full"], ((3, 4), (1, 2)))
    sharded.load(saved["folder"], {"w": below})
    assert below.tensor.item() == saved["full"][3, 1]


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    got = {"w": Piece(torch.zeros(2), ((0, 2),), (2,))}
    with pytest.raises(CheckpointError, match="no such folder"):
        sharded.load(tmp_path / "none", got)
    with pytest.raises(CheckpointError, match="w is missing"):
        sharded.load(tmp_path, got)
    (tmp_path / "rank-00000.safetensors").write_bytes(b"not it")
    with pytest.raises(CheckpointError, match="cannot load"):
        sharded.load(tmp_path, got)


def test_boxes_that_overlap_or_leave_a_gap(tmp_path: Path) -> None:
    full = torch.arange(6.0)
    for second in (((2, 6),), ((4, 6),)):
        with pytest.raises(ValueError, match=r"w (has overlapping chunks|invalid fill)"):
            save_as_ranks(tmp_path, [{"w": piece(full, ((0, 3),))}, {"w": piece(full, second)}])
