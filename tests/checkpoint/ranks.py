"""Four processes that save, of which two and one load: `python -m tests.checkpoint.ranks FOLDER`."""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.ranks import ended
from verl.checkpoint import sharded
from verl.checkpoint.sharded import Piece
from verl.core.errors import CheckpointError
from verl.weights.boxes import Box, slices, whole

WORLD = 4
FULL = {
    "grid": torch.randn(7, 10, generator=torch.Generator().manual_seed(0)),
    "rows": torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "same": torch.arange(11),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}
QUARTERS: list[Box] = [((a, b), (c, d)) for a, b in ((0, 4), (4, 7)) for c, d in ((0, 3), (3, 10))]


def part(name: str, box: Box) -> Piece:
    full = FULL[name]
    return Piece(full[slices(box, whole(full.shape))], box, tuple(full.shape))


def blank(name: str, box: Box) -> Piece:
    full = FULL[name]
    return Piece(torch.zeros_like(full[slices(box, whole(full.shape))]), box, tuple(full.shape))


def saves(rank: int) -> dict[str, Piece]:
    """Quarters of a grid; rows over two ranks, twice; a row a rank and none for the last."""
    row = min(rank, 3)
    return {
        "grid": part("grid", QUARTERS[rank]),
        "rows": part("rows", ((row, min(row + 1, 3)), (0, 5), (0, 2))),
        "same": part("same", ((0, 6),) if rank % 2 else ((6, 11),)),
        "scalar": part("scalar", ()),
    }


def loads(rank: int, world: int) -> dict[str, Piece]:
    """Columns."""
    cols = [((0, 7), (0, 4)), ((0, 7), (4, 10))][rank] if world > 1 else whole((7, 10))
    middle = ((0, 3), (0, 2), (0, 2)) if rank else whole((3, 5, 2))
    boxes: dict[str, Box] = {"grid": cols, "rows": middle, "same": ((3, 9),), "scalar": ()}
    return {name: blank(name, box) for name, box in boxes.items()}


def compare(pieces: dict[str, Piece]) -> None:
    for name, got in pieces.items():
        want: Tensor = FULL[name][slices(got.box, whole(got.shape))]
        assert torch.equal(got.tensor, want), name


def join(folder: Path, rank: int, world: int) -> None:
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))


def run_rank(rank: int, folder: Path) -> None:
    saved = folder / "saved"
    join(folder, rank, WORLD)
    assert sharded.save(saved, saves(rank)) == [f"rank-{rank:05d}.safetensors"]
    again = {name: blank(name, piece.box) for name, piece in saves(rank).items()}
    sharded.load(saved, again, complete=True)
    compare(again)
    _one_fails(rank, folder)
    dist.destroy_process_group()
    if rank < 2:
        join(folder, rank, 2)
        got = loads(rank, 2)
        sharded.load(saved, got, complete=True)
        compare(got)
        dist.destroy_process_group()
    elif rank == 2:
        got = loads(0, 1)
        sharded.load(saved, got, complete=True)
        compare(got)


def _one_fails(rank: int, folder: Path) -> None:
    """Every rank hears of what one of them cannot do."""
    wrong = {"scalar": Piece(torch.tensor(0.0), (), ())} if rank == 3 else {"scalar": blank("scalar", ())}
    with pytest.raises(CheckpointError, match="cannot load, rank 3: scalar is .*float64, the model's is .*float32"):
        sharded.load(folder / "saved", wrong)
    (folder / "taken").touch()
    with pytest.raises(CheckpointError, match=r"cannot write, rank \d: "):
        sharded.save(folder / "taken" / "below" if rank == 1 else folder / "other", saves(rank))


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, folder), daemon=True) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    return ended(ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
