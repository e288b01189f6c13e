"""What this rank holds of each parameter: a box in the whole tensor, over pipeline stages, tensor ranks and FSDP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.models.cuts import Part, Share
from verl.models.decoder import Decoder
from verl.weights.boxes import Box, intersect, slices, whole

NOTHING = Part(0, 0, 0, 0)


@dataclass(frozen=True)
class Holding:
    """Of one module. Names are its parameters'; tensors are those, or masters and moments that are cut as they are.

    share: what tensor ranks and stages have of it; None: all.
    """

    share: Share | None

    @classmethod
    def of(cls, module: nn.Module) -> Holding:
        return cls(share_of(module))

    def shape(self, name: str, p: Tensor) -> tuple[int, ...]:
        """Of the whole tensor."""
        part = self._part(name)
        return tuple(p.shape) if part is None else part.whole_shape(p.shape)

    def box(self, name: str, p: Tensor) -> Box:
        """What this rank holds of it, maybe empty."""
        box, part = list(_fsdp_box(p)), self._part(name)
        if part is not None:
            start, end = box[part.dim]
            box[part.dim] = (part.start + start, part.start + end)
        return tuple(box)

    def owned(self, name: str, p: Tensor) -> Box:
        """The part of `box` that counts as this rank's: over stages and tensor ranks, every element counts once. Data
        replicas own the same.
        """
        box, own = self.box(name, p), self._owned_part(name)
        if own is None:
            return box
        limits = list(whole(self.shape(name, p)))
        limits[own.dim] = (own.start, own.stop)
        return intersect(box, tuple(limits)) or tuple((start, start) for start, _ in box)

    def own(self, name: str, p: Tensor) -> tuple[slice, ...]:
        """Where `owned` lies in this rank's local tensor."""
        return slices(self.owned(name, p), self.box(name, p))

    def _part(self, name: str) -> Part | None:
        return None if self.share is None else self.share.part(name)

    def _owned_part(self, name: str) -> Part | None:
        """None: all that is held."""
        share = self.share
        if share is None:
            return None
        if "embed_tokens" in name and not share.stage.first:
            return NOTHING  # a tied embedding's second copy
        if share.cuts is None:
            return None
        own = share.cuts.owned_part(name, share.tp_rank)
        return own if own is not None or share.tp_rank == 0 else NOTHING


def decoder_of(module: nn.Module) -> Decoder | None:
    """The native decoder in a policy or a value model; None in other models, which are whole but for FSDP."""
    model = getattr(module, "model", None)
    return model if isinstance(model, Decoder) else None


def share_of(module: nn.Module) -> Share | None:
    """Of the native decoder."""
    decoder = decoder_of(module)
    return None if decoder is None else decoder.share


def hidden_size(module: nn.Module) -> int:
    """Of a module that is a stage of a pipeline."""
    decoder = decoder_of(module)
    assert decoder is not None, "only the native decoder has stages"
    return decoder.config.hidden_size


def is_tied(module: nn.Module) -> bool:
    """Whether the module's head is its embedding."""
    decoder = decoder_of(module)
    return decoder is not None and decoder.config.tied and hasattr(module, "logits")


def _fsdp_box(p: Tensor) -> Box:
    if not isinstance(p, DTensor):
        return whole(p.shape)
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
