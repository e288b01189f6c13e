"""Tensors of which ranks hold parts, in one folder: each rank writes what it holds, any other layout reads it.

By torch.distributed.checkpoint, whose planners agree on who writes which part and who reads what. The files are
safetensors (its Hugging Face format), so nothing that is loaded can run code.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from verl.core.errors import CheckpointError
from verl.weights.boxes import Box, extents, numel


@dataclass(frozen=True)
class Piece:
    """What a rank holds of one tensor. tensor: plain, contiguous or not; box: where it lies in the whole; shape: of the
    whole. A piece may be empty; its tensor then says no more than the dtype.
    """

    tensor: Tensor
    box: Box
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        empty = self.tensor.numel() == 0 == numel(self.box)
        assert empty or tuple(self.tensor.shape) == extents(self.box), f"{tuple(self.tensor.shape)} is not {self.box}"
        assert len(self.box) == len(self.shape), f"{self.box} is no box of {self.shape}"

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in torch's terms."""
        return ChunkStorageMetadata(torch.Size(start for start, _ in self.box), torch.Size(extents(self.box)))


def save(folder: str | Path, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None = None) -> list[str]:
    """Write all pieces into `folder`, one file a rank at most; returns once all ranks have: names of this rank's files.

    A collective over `group` (None: all processes, or this one without torch.distributed). What several ranks have the
    same box of, one of them writes; other boxes must not overlap, and together they are the whole. CheckpointError on
    every rank where one cannot write, or where boxes overlap or leave something out.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    writer = _Writer(folder, rank)
    with _one_error(folder, "cannot write"):
        dcp.save({}, storage_writer=writer, planner=Writing(pieces), process_group=group)
    return writer.written


def load(
    folder: str | Path,
    pieces: Mapping[str, Piece],
    group: dist.ProcessGroup | None = None,
    complete: bool = False,
) -> None:
    """Copy into each piece's tensor what its box says, under whatever boxes it was saved. A collective as `save` is.

    complete: refuse a folder with tensors that no rank asks for. CheckpointError on every rank, with the name of the
    tensor where one is missing, or has another shape or dtype.
    """
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    with _one_error(folder, "cannot load"):
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load({}, storage_reader=reader, planner=Reading(pieces, complete), process_group=group)


class Writing(DefaultSavePlanner):
    """Which pieces are written, by whom: each distinct box once, spread over the ranks that hold it."""

    def __init__(self, pieces: Mapping[str, Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write(name, piece) for name, piece in self.pieces.items() if numel(piece.box)])

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor on the host, contiguous, in a storage of its own."""
        x = self.pieces[index.fqn].tensor.detach().cpu().contiguous()
        return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


class Reading(DefaultLoadPlanner):
    """Which parts of which files fill the pieces."""

    def __init__(self, pieces: Mapping[str, Piece], complete: bool = False):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces, self.complete = pieces, complete

    def create_local_plan(self) -> LoadPlan:
        reads = [read for name, piece in self.pieces.items() for read in self._reads(name, piece)]
        return LoadPlan(reads, planner_data=list(self.pieces))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        asked = {name for plan in global_plan for name in plan.planner_data}
        left = sorted(self.metadata.state_dict_metadata.keys() - asked)
        if self.complete and left:
            raise CheckpointError(f"it holds {len(left)} tensors that the model has not, such as {left[0]}")
        return global_plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn].tensor

    def _reads(self, name: str, piece: Piece) -> list[ReadItem]:
        """All that fills the piece. CheckpointError where the saved tensor is another one."""
        if not prod(piece.shape):
            return []  # nothing was written of a tensor without elements
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{name} is missing")
        if tuple(saved.size) != piece.shape or saved.properties.dtype != piece.tensor.dtype:
            raise CheckpointError(
                f"{name} is {tuple(saved.size)} of {saved.properties.dtype}, "
                f"the model's is {piece.shape} of {piece.tensor.dtype}"
            )
        if not numel(piece.box):
            return []
        reads = create_read_items_for_chunk_list(name, saved, [piece.chunk])
        if sum(prod(read.lengths) for read in reads) != numel(piece.box):
            raise CheckpointError(f"{name} is not whole: a part of {piece.box} is missing")
        return reads


class _Writer(HuggingFaceStorageWriter):
    """One safetensors file a rank, written from where the tensors lie and made durable."""

    def __init__(self, folder: str | Path, rank: int):
        super().__init__(str(folder), save_distributed=True)
        self.name, self.written = f"rank-{rank:05d}.safetensors", list[str]()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            path = Path(self.path) / self.name
            offsets = {i.index.fqn: {SAVED_OFFSETS_KEY: list(i.index.offset or ())} for i in plan.items}
            tensors: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
            save_file(tensors, path, {"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offsets)})
            with path.open("rb") as f:
                os.fsync(f.fileno())
            self.written.append(self.name)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def _write(name: str, piece: Piece) -> WriteItem:
    data = TensorWriteData(piece.chunk, TensorProperties(piece.tensor.dtype), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(name, piece.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


@contextmanager
def _one_error(folder: str | Path, what: str) -> Iterator[None]:
    """torch's account of what failed on which rank, as one CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is a world, too
            yield
    except dcp.CheckpointException as e:
        rank, (error, _) = next(iter(e.failures.items()))
        said = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder}: {what}, rank {rank}: {said}") from e
