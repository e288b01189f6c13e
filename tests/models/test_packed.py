"""Packing, the attention plan, and log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.helpers import FP32, batch_of, ragged_batch, rows_of
from tests.tiny import make_model
from verl.models import logprobs as logprobs_module
from verl.models.attention import PackedAttention
from verl.models.kernels import Kernels
from verl.models.load import load_policy
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput
from verl.models.plan import Block, Plan
from verl.models.vocabulary import Vocabulary


def paths(blocks: list[Block]) -> list[list[int]]:
    """For each packed token, the packed tokens from the root of its tree to itself."""
    out = []
    for block in blocks:
        at, trunks = block.start, list[list[int]]()
        follows = [None, *(block.follows or [0] * len(block.branches))]
        for size, above in zip((block.prompt, *block.branches), follows, strict=True):
            path = [] if above is None else trunks[above]
            for i in range(at, at + size):
                path = [*path, i]
                out.append(path)
            trunks.append(path)
            at += size
    return out


def loop_attention(blocks: list[Block], q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One token and head at a time."""
    out = torch.empty_like(q)
    ratio = q.shape[1] // k.shape[1]
    for i, path in enumerate(paths(blocks)):
        seen = path if window is None else path[-window:]
        for h in range(q.shape[1]):
            score = k[seen, h // ratio] @ q[i, h] / q.shape[-1] ** 0.5
            out[i, h] = torch.softmax(score, 0) @ v[seen, h // ratio]
    return out


Tree = tuple[int, list["Tree"]]


def blocks_of(trees: list[Tree]) -> list[Block]:
    blocks, start = [], 0
    for tree in trees:
        (_, prompt), *rest = _preorder(tree, 0, 0)
        blocks.append(Block(start, prompt, tuple(n for _, n in rest), tuple(above for above, _ in rest)))
        start += blocks[-1].length
    return blocks


def _preorder(tree: Tree, above: int, number: int) -> list[tuple[int, int]]:
    """(number of the node above, tokens) of each node."""
    out = [(above, tree[0])]
    for child in tree[1]:
        out += _preorder(child, number, number + len(out))
    return out


TREES = st.lists(
    st.recursive(
        st.tuples(st.integers(1, 9), st.just([])),
        lambda below: st.tuples(st.integers(0, 9), st.lists(below, min_size=1, max_size=4)),
        max_leaves=7,
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(TREES, st.sampled_from([None, 1, 3, 9]))
def test_attention_over_any_tree_is_the_loop(trees: list[Tree], window: int | None) -> None:
    blocks = blocks_of(trees)
    size = sum(b.length for b in blocks)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, heads, 4, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    got = PackedAttention(Plan.of(blocks), lambda layer: window)(0, *inputs)
    want = loop_attention(blocks, *inputs, window)
    torch.testing.assert_close(got, want)
    weight = torch.randn(got.shape, generator=g, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((want * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_long_branches_are_attended_apart_and_short_ones_as_one_square() -> None:
    short = Plan.of([Block(0, 60, (5,) * 8)])
    assert [tuple(b.query.shape) for b in short.buckets] == [(1, 100)]
    long = Plan.of([Block(0, 20, (30,) * 8)])
    assert sorted((tuple(b.query.shape), tuple(b.key.shape)) for b in long.buckets) == [
        ((1, 20), (1, 20)),
        ((8, 30), (8, 50)),
    ]


def test_a_tree_of_prompts_is_cut_below_its_root() -> None:
    """16 prompts of 94 tokens that begin with the same 80, each with short samples: no square over everything."""
    follows = tuple(n for g in range(16) for n in (0, *[1 + 4 * g] * 3))
    plan = Plan.of([Block(0, 80, (14, 2, 2, 1) * 16, follows)])
    assert sorted((tuple(b.query.shape), tuple(b.key.shape), b.causal) for b in plan.buckets) == [
        ((1, 80), (1, 80), True),
        ((16, 19), (16, 99), False),
    ]


def test_ragged_lengths_waste_little() -> None:
    lengths = list(range(100, 2000, 37))
    plan = Plan.sequences(lengths)
    padded = sum(b.query.numel() for b in plan.buckets)
    assert padded < 1.2 * sum(lengths)


def test_a_shared_prompt_appears_once_and_unneeded_tokens_not_at_all() -> None:
    prompt = [7, 8, 9]
    batch = batch_of(
        [[*prompt, 1, 2], [*prompt, 3], [*prompt, 4, 5, 6], [7, 8, 1], [5, 5]],
        [[0, 0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1, 1, 0], [0, 0, 1], [0, 0]],
        [0, 0, 0, 0, 0],
    )
    packed = PackedInput.of(batch, share_prompt=True)
    assert packed.token_ids.tolist() == [7, 8, 9, 1, 4, 7, 8]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 3, 0, 1]
    assert packed.blocks == (Block(0, 3, (1, 0, 1)), Block(5, 2))
    assert packed.where.tolist() == [3, 4, 8, 12, 13, 17]
    assert packed.target.tolist() == [1, 2, 3, 4, 5, 1]
    assert packed.pred.tolist() == [2, 3, 2, 2, 4, 6]
    assert packed.num_tokens == batch.num_tokens
    alone = PackedInput.of(batch, share_prompt=False)
    assert alone.token_ids.tolist() == [7, 8, 9, 1, 7, 8, 9, 7, 8, 9, 4, 7, 8]


def test_prompts_of_other_groups_share_what_they_begin_with() -> None:
    """A tree of three levels: 9 tokens of all, 8 more of two prompts (one ends there), samples."""
    root, more = list(range(100, 109)), list(range(200, 208))
    prompts = [[*root, *more, 1], [*root, 2], [*root, *more], [*root, 2], [7, 7], [7, 7]]
    batch = batch_of(
        [[*prompt, 50 + i, 60] for i, prompt in enumerate(prompts)],
        [[0] * len(prompt) + [1, 1] for prompt in prompts],
        [0, 1, 2, 1, 3, 4],
    )
    packed = PackedInput.of(batch, share_prompt=True)
    assert packed.blocks == (Block(0, 9, (8, 2, 1, 1, 1, 1), (0, 1, 1, 0, 4, 4)), Block(23, 2, (1, 1)))
    assert packed.token_ids.tolist() == [*root, *more, 1, 50, 52, 2, 51, 53, 7, 7, 54, 55]


def test_short_or_slight_beginnings_are_not_shared() -> None:
    def inputs(head: int, rest: int) -> int:
        seqs = [[*range(head), 100 + i, *[5] * rest, 6] for i in range(3)]
        return len(
            PackedInput.of(batch_of(seqs, [[0] * (head + 1 + rest) + [1] for _ in seqs], [0, 1, 2]), True).blocks
        )

    assert [inputs(7, 3), inputs(8, 3), inputs(8, 40), inputs(8, 60)] == [3, 1, 1, 3]


def test_a_slight_beginning_hides_no_longer_one() -> None:
    """Two families of prompts, unlike after 10 tokens: the 10 are worth nothing beside the 100 of each family."""
    start = list(range(10))
    seqs = [[*start, *[f] * 200, *[10 + f] * 200, 20 + i, *[30 + i] * 180, 1] for f in (1, 2) for i in (0, 1)]
    batch = batch_of(seqs, [[0] * (len(s) - 1) + [1] for s in seqs], [0, 1, 2, 3])
    packed = PackedInput.of(batch, share_prompt=True)
    assert [(b.prompt, b.branches) for b in packed.blocks] == [(410, (181, 181))] * 2


def test_equal_samples_of_a_prompt_are_one_branch() -> None:
    batch = batch_of([[3, 4, 5, 6], [3, 4, 5, 7], [3, 4, 8, 6]], [[0, 0, 1, 1]] * 3, [0] * 3)
    packed = PackedInput.of(batch, share_prompt=True)
    assert packed.token_ids.tolist() == [3, 4, 5, 8] and packed.blocks == (Block(0, 2, (1, 1)),)
    assert packed.pred.tolist() == [1, 2, 1, 2, 1, 3] and packed.target.tolist() == [5, 6, 5, 7, 8, 6]


TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=3)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), TOKENS, st.integers(0, 30), TOKENS), min_size=1, max_size=10),
    st.booleans(),
)
def test_every_row_sees_exactly_its_own_sequence(
    parts: list[tuple[int, list[int], int, list[int]]], share: bool
) -> None:
    """Whatever is shared: the path of the token that predicts a row spells the tokens before the row."""
    prompts = [[2] * a + b + [3] * c for a, b, c, _ in parts]
    seqs = [p + d + [4] for p, (_, _, _, d) in zip(prompts, parts, strict=True)]
    masks = [[0] * len(p) + [1] * (len(s) - len(p)) for p, s in zip(prompts, seqs, strict=True)]
    batch = batch_of(seqs, masks, list(range(len(seqs))))
    packed = PackedInput.of(batch, share)
    assert packed.where.sort().values.tolist() == rows_of(batch).nonzero().flatten().tolist()
    path, seq = paths(list(packed.blocks)), batch.seq_of_token.tolist()
    for row, pred in zip(packed.where.tolist(), packed.pred.tolist(), strict=True):
        start = int(batch.cu_seqlens[seq[row]])
        assert packed.token_ids[path[pred]].tolist() == batch["token_ids"][start:row].tolist()
        assert packed.position_ids[path[pred]].tolist() == list(range(row - start))
    again = PackedInput.of(batch, share)
    assert again.blocks == packed.blocks and torch.equal(again.token_ids, packed.token_ids)


@pytest.mark.parametrize("share", [False, True])
def test_rows_are_exactly_the_sampled_tokens(share: bool) -> None:
    batch = ragged_batch()
    packed = PackedInput.of(batch, share)
    assert packed.where.sort().values.tolist() == rows_of(batch).nonzero().flatten().tolist()
    assert torch.equal(batch["token_ids"][packed.where], packed.target)


def test_a_batch_without_rows_gives_zeros(tmp_path: Path) -> None:
    policy = load_policy(make_model(tmp_path / "m"), FP32)
    batch = batch_of([[5, 6, 7], [8]], [[0, 0, 0], [1]], [0, 1])
    logprobs, entropy = token_logprobs(policy, PackedInput.of(batch, True), 1.0, entropy=True)
    assert logprobs.tolist() == [0.0] * 4 and entropy is not None and entropy.tolist() == [0.0] * 4


class Table:
    """A policy that is a table of logits, for log-probs alone."""

    kernels: Kernels | None = None
    vocabulary: Vocabulary | None = None

    def __init__(self, table: Tensor):
        self.table = table

    def features(self, packed: PackedInput) -> Tensor:
        return self.table[packed.token_ids]

    def logits(self, features: Tensor) -> Tensor:
        return features


@pytest.mark.parametrize("rows", [1, 2, 5, 1000])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_logprobs_and_entropy_in_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float) -> None:
    vocab = 12
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", rows * vocab)
    table = (torch.randn(290, vocab, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    batch = ragged_batch(vocab=vocab)
    packed = PackedInput.of(batch, True)
    logprobs, entropy = token_logprobs(Table(table), packed, temperature, entropy=True)
    assert entropy is not None
    law = torch.log_softmax(table[packed.token_ids[packed.pred]] / temperature, dim=-1)
    want = packed.scatter(law.gather(1, packed.target[:, None]).squeeze(1))
    want_entropy = packed.scatter(-(law.exp() * law).sum(-1))
    torch.testing.assert_close(logprobs, want)
    torch.testing.assert_close(entropy, want_entropy)
    weight = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad((logprobs * weight[0] + entropy * weight[1]).sum(), table)
    (expected,) = torch.autograd.grad((want * weight[0] + want_entropy * weight[1]).sum(), table)
    torch.testing.assert_close(got, expected)


def test_impossible_tokens_do_not_spoil_the_entropy() -> None:
    """Logits of -inf (a masked vocabulary): their probability is 0 and their share of the entropy too."""
    table = torch.zeros(10, 4)
    table[:, 3] = float("-inf")
    table.requires_grad_()
    batch = batch_of([[1, 2, 0]], [[0, 1, 1]], [0])
    logprobs, entropy = token_logprobs(Table(table), PackedInput.of(batch, False), 1.0, entropy=True)
    assert entropy is not None
    torch.testing.assert_close(entropy[1:], torch.full((2,), 3.0).log())
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), table)
    assert torch.isfinite(grad).all()


def test_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(Table(torch.zeros(4, 4)), PackedInput.of(batch_of([[1, 2]], [[0, 1]], [0]), False), 0.0)
