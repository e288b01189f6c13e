"""What this process holds of each parameter of a model: the one place that knows of every way to cut one."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.checkpoint.sharded import Piece
from verl.models.cuts import Part, Share
from verl.models.decoder import Decoder
from verl.weights.boxes import Box, slices, whole


def share_of(module: nn.Module) -> Share | None:
    """Of the decoder inside, which tensor ranks and stages may hold together; None: no native one, so all of it."""
    decoder = getattr(module, "model", None)
    return decoder.share if isinstance(decoder, Decoder) else None


def held(name: str, p: Tensor, share: Share | None = None) -> tuple[Box, tuple[int, ...]]:
    """(box, shape): where this process's part of a parameter lies, and the shape of the whole one, over all processes.

    A DTensor is cut by FSDP; inside of what `share` says that this tensor rank has of it.
    """
    shape, box = tuple(p.shape), whole(p.shape)
    if isinstance(p, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
    part = None if share is None else share.part(name)
    if part is None:
        return box, shape
    return _moved(box, part), part.whole_shape(shape)


def owned(name: str, piece: Piece, share: Share | None = None) -> Piece:
    """What this process writes of its piece of a parameter: of key heads that several tensor ranks hold, those that no
    rank before has. Pieces that are the same on several processes stay so.
    """
    own = None if share is None or share.cuts is None else share.cuts.owned_part(name, share.tp_rank)
    if own is None or not piece.tensor.numel():
        return piece
    start, end = piece.box[own.dim]
    start = max(start, min(own.start, end))
    box = (*piece.box[: own.dim], (start, end), *piece.box[own.dim + 1 :])
    return replace(piece, tensor=piece.tensor[slices(box, piece.box)], box=box)


def _moved(box: Box, part: Part) -> Box:
    """A box of a part as one of the whole."""
    start, end = box[part.dim]
    return (*box[: part.dim], (start + part.start, end + part.start), *box[part.dim + 1 :])
