"""A vocabulary that is cut over tensor-parallel ranks: lookup, logits and the law of the whole from its parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.cuts import Cuts, Part
from verl.models.law import Law
from verl.parallel.axes import TensorParallel
from verl.parallel.collectives import gather_columns, reduce_from


@dataclass(frozen=True)
class Vocabulary:
    """This rank's entries of a vocabulary: `part` of the rows of embedding and head. width: most that a rank has."""

    part: Part
    width: int
    tp: TensorParallel

    @staticmethod
    def of(cuts: Cuts, tp: TensorParallel) -> Vocabulary:
        part, first = (cuts.part("embed_tokens.weight", rank) for rank in (tp.rank, 0))
        assert part is not None and first is not None
        return Vocabulary(part, first.stop, tp)

    def own(self, ids: Tensor) -> Tensor:
        """Token ids counted from this rank's first; -1 for those of other ranks."""
        mine = (ids >= self.part.start) & (ids < self.part.stop)
        return torch.where(mine, ids - self.part.start, -1)

    def gather(self, logits: Tensor) -> Tensor:
        """[..., V] on every rank from its own [..., part]. No gradient."""
        return gather_columns(logits, self.width, self.part.size, self.tp)

    def whole(self, law: Law, logit_R: Tensor) -> tuple[Law, Tensor]:
        """The law of all logits from those of each rank's own, and the targets' logits, which are 0 where another rank
        owns the target.

        With w = the mass of a part: H = sum w (H_part - log w), and the sum of squares is sum w^2 S_part.
        """
        top_U = law.norm.clone()
        dist.all_reduce(top_U, dist.ReduceOp.MAX, group=self.tp.group)
        share_U, mass_U = law.norm - top_U, (law.norm - top_U).exp()
        sums = [mass_U]
        if law.entropy is not None:  # where the mass is 0, the share may be -inf
            sums.append(mass_U * (law.entropy - share_U.clamp(min=-1e30)))
        if law.squares is not None:
            sums.append(mass_U.square() * law.squares)
        flat = torch.cat([*sums, logit_R])
        dist.all_reduce(flat, group=self.tp.group)
        total_U, *more = flat[: len(flat) - len(logit_R)].view(len(sums), -1).unbind()
        entropy = None if law.entropy is None else more.pop(0) / total_U + total_U.log()
        squares = None if law.squares is None else more.pop(0) / total_U.square()
        return Law(top_U + total_U.log(), entropy, squares), flat[len(flat) - len(logit_R) :]


class CutEmbedding(nn.Embedding):
    """The rows of this rank's tokens; a lookup finds 0 for those of other ranks, and sums over all."""

    def __init__(self, vocabulary: Vocabulary, width: int, dtype: torch.dtype, device: torch.device | str):
        part = vocabulary.part
        super().__init__(part.stop - part.start, width, dtype=dtype, device=device)
        self.vocabulary = vocabulary

    def forward(self, token_ids: Tensor) -> Tensor:
        own = self.vocabulary.own(token_ids)
        rows = F.embedding(own.clamp(min=0), self.weight).masked_fill((own < 0).unsqueeze(-1), 0)
        return reduce_from(rows, self.vocabulary.tp)
