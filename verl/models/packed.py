"""A batch as the model reads it: no padding, and a prompt that several samples share appears once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.core.batch import Batch
from verl.models.plan import Block, Plan


@dataclass(frozen=True)
class PackedInput:
    """P input tokens, and R rows: the tokens of the batch that the model is asked about.

    A row is a position with loss_mask 1 that is not the first of its sequence. Tokens after the last state that a row
    needs are left out, so a sequence without rows has no tokens here.

    token_ids [P], position_ids [P]: the input. blocks: how it divides into prompts and branches; plan: who sees whom.
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

        share_prompt: sequences of one `group_id` whose tokens before their first sampled token are the same share them.
        """
        place = batch["token_ids"].device if device is None else device
        ids, mask = batch["token_ids"].cpu(), batch["loss_mask"].cpu()
        groups = _groups(batch, ids, mask, share_prompt)
        layout = _Layout()
        for spans in groups:
            layout.add(spans)
        if not layout.tokens:  # no row at all: one token keeps the model's shapes valid, and nothing reads its state
            layout.add([_Span(0, 1, 1, torch.empty(0, dtype=torch.int64))])
        where = _cat(layout.where)
        return PackedInput(
            token_ids=ids[_cat(layout.tokens)].to(place),
            position_ids=_cat(layout.positions).to(place),
            blocks=tuple(layout.blocks),
            plan=Plan.of(layout.blocks, place),
            pred=_cat(layout.pred).to(place),
            target=ids[where].to(place),
            where=where.to(place),
            num_tokens=batch.num_tokens,
            longest=max(block.prompt + max(block.branches, default=0) for block in layout.blocks),
        )

    def scatter(self, values_R: Tensor) -> Tensor:
        """[R] row values as [T], 0 elsewhere."""
        return values_R.new_zeros(self.num_tokens).index_copy(0, self.where, values_R)


@dataclass(frozen=True)
class _Span:
    """Input tokens of one sequence: [start, stop) of the batch, the first `prompt` shared. rows: batch indices."""

    start: int
    stop: int
    prompt: int
    rows: Tensor


def _groups(batch: Batch, ids: Tensor, mask: Tensor, share: bool) -> list[list[_Span]]:
    """Sequences that share a prompt, in order of first appearance; each alone where nothing is shared."""
    groups: dict[Hashable, list[_Span]] = {}
    offsets = batch.cu_seqlens.tolist()
    group_ids = batch["group_id"].tolist() if share else [None] * batch.num_seqs
    for number, (start, stop, group) in enumerate(zip(offsets[:-1], offsets[1:], group_ids, strict=True)):
        drawn = mask[start:stop].nonzero().flatten() + start
        rows = drawn[drawn > start]
        if not len(rows):
            continue
        last = int(rows[-1])
        prompt = int(drawn[0]) - start
        if share and prompt:
            key: Hashable = (group, ids[start : start + prompt].numpy().tobytes())
            groups.setdefault(key, []).append(_Span(start, last, prompt, rows))
        else:
            groups[("alone", number)] = [_Span(start, last, last - start, rows)]
    return list(groups.values())


class _Layout:
    """Grows the packed index lists, block by block."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.pred: list[Tensor] = []
        self.where: list[Tensor] = []
        self.blocks: list[Block] = []
        self.size = 0

    def add(self, spans: list[_Span]) -> None:
        if len(spans) == 1:  # nothing to share
            only = spans[0]
            spans = [_Span(only.start, only.stop, only.stop - only.start, only.rows)]
        first, begin = spans[0], self.size
        self._tokens(first.start, first.start + first.prompt, 0)
        for span in spans:
            branch = self.size - span.prompt
            self._tokens(span.start + span.prompt, span.stop, span.prompt)
            before = span.rows - 1 - span.start
            self.pred.append(torch.where(before < span.prompt, begin + before, branch + before))
            self.where.append(span.rows)
        branches = tuple(s.stop - s.start - s.prompt for s in spans) if len(spans) > 1 else ()
        self.blocks.append(Block(begin, first.prompt, branches))

    def _tokens(self, start: int, stop: int, position: int) -> None:
        self.tokens.append(torch.arange(start, stop))
        self.positions.append(torch.arange(position, position + stop - start))
        self.size += stop - start


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
