"""Ranks that save together, played one after the other in this process; and everything that a folder holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from verl.checkpoint.sharded import Piece, Writing, _Writer, load
from verl.weights.boxes import whole


def save_as_ranks(folder: Path, ranks: Sequence[Mapping[str, Piece]]) -> list[list[str]]:
    """What `save` does on as many processes; the files of each."""
    planners = [Writing(pieces) for pieces in ranks]
    writers = [_Writer(folder, rank) for rank in range(len(ranks))]
    plans = [w.prepare_local_plan(p.create_local_plan()) for w, p in zip(writers, planners, strict=True)]
    plans = writers[0].prepare_global_plan(planners[0].create_global_plan(plans)[0])
    for writer, planner, plan in zip(writers, planners, plans, strict=True):
        writer.write_data(plan, planner)
    return [writer.written for writer in writers]


def everything(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, whole."""
    saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    out = {name: torch.empty(data.size, dtype=data.properties.dtype) for name, data in saved.items()}
    load(folder, {name: Piece(x, whole(x.shape), tuple(x.shape)) for name, x in out.items()}, complete=True)
    return out
