"""A batch as the model reads it: no padding, and what several samples begin with appears once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from verl.core.batch import Batch
from verl.core.errors import ModelError
from verl.models.plan import Block, Plan
from verl.models.tree import Node, Span, forest


@dataclass(frozen=True)
class PackedInput:
    """P input tokens, and R rows: the tokens of the batch that the model is asked about.

    A row is a position with loss_mask 1 that is not the first of its sequence. Tokens after the last state that a row
    needs are left out, so a sequence without rows has no tokens here.

    token_ids [P], position_ids [P]: the input. blocks: how it divides into trees; plan: who sees whom.
    pred [R]: packed index of the token whose hidden state predicts the row's token. target [R]: that token.
    where [R]: its index in the batch's T tokens. num_tokens: T. longest: longest sequence among the inputs.
    """

    token_ids: Tensor
    position_ids: Tensor
    blocks: tuple[Block, ...]
    plan: Plan
    pred: Tensor
    target: Tensor
    where: Tensor
    num_tokens: int
    longest: int

    @staticmethod
    def of(batch: Batch, share_prompt: bool, device: torch.device | str | None = None) -> PackedInput:
        """Pack a batch; on `device` (None: where the batch is).

        share_prompt: sequences whose tokens before their first sampled one are the same share these, and prompts that
        begin alike share that beginning (`tree.forest`).
        """
        place = batch["token_ids"].device if device is None else device
        ids, mask = batch["token_ids"].cpu(), batch["loss_mask"].cpu()
        if len(ids) and int(ids.min()) < 0:
            raise ModelError(f"token_ids: {int(ids.min())} is no token id")
        spans = _spans(batch, mask)
        layout = _Layout()
        for root in forest(spans, ids) if share_prompt else [Node(s.start, 0, s.stop - s.start, (s,)) for s in spans]:
            layout.add(root)
        if not spans:  # no row at all: one token keeps the model's shapes valid, and nothing reads its state
            layout.add(Node(0, 0, 1))
        positions, where = _cat(layout.positions), _cat(layout.where)
        return PackedInput(
            token_ids=ids[_cat(layout.tokens)].to(place),
            position_ids=positions.to(place),
            blocks=tuple(layout.blocks),
            plan=Plan.of(layout.blocks, place),
            pred=_cat(layout.pred).to(place),
            target=ids[where].to(place),
            where=where.to(place),
            num_tokens=batch.num_tokens,
            longest=int(positions.max()) + 1,
        )

    def scatter(self, values_R: Tensor) -> Tensor:
        """[R] row values as [T], 0 elsewhere."""
        return values_R.new_zeros(self.num_tokens).index_copy(0, self.where, values_R)


def _spans(batch: Batch, mask: Tensor) -> list[Span]:
    """The sequences that have rows, up to the last token that a row needs."""
    spans = []
    offsets = batch.cu_seqlens.tolist()
    for start, stop in pairwise(offsets):
        drawn = mask[start:stop].nonzero().flatten() + start
        rows = drawn[drawn > start]
        if len(rows):
            spans.append(Span(start, int(rows[-1]), int(drawn[0]) - start, rows))
    return spans


class _Layout:
    """Grows the packed index lists, tree by tree."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.pred: list[Tensor] = []
        self.where: list[Tensor] = []
        self.blocks: list[Block] = []
        self.size = 0

    def add(self, root: Node) -> None:
        start, sizes, follows = self.size, list[int](), list[int]()
        self._add(root, torch.empty(0, dtype=torch.int64), 0, sizes, follows)
        self.blocks.append(Block(start, sizes[0], tuple(sizes[1:]), tuple(follows[1:]) if any(follows) else ()))

    def _add(self, node: Node, path: Tensor, above: int, sizes: list[int], follows: list[int]) -> None:
        """A node and all below it. path: packed indices of the tokens before it; above: number of the node above."""
        path = torch.cat([path, torch.arange(self.size, self.size + node.size)])
        self.tokens.append(torch.arange(node.source, node.source + node.size))
        self.positions.append(torch.arange(node.at, node.at + node.size))
        self.size += node.size
        number = len(sizes)
        sizes.append(node.size)
        follows.append(above)
        for span in node.spans:
            self.pred.append(path[span.rows - 1 - span.start])
            self.where.append(span.rows)
        for child in node.children:
            self._add(child, path, number, sizes, follows)


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
