"""Batch: columns checked where they are made; take, concat and merge keep rows whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.core import Completion, Prompt, Trajectory
from verl.core.batch import Batch, cumulative


def make(lengths: list[int], start: int = 0) -> Batch:
    n = sum(lengths)
    return Batch(
        cumulative(torch.tensor(lengths)),
        {
            "token_ids": torch.arange(start, start + n),
            "loss_mask": torch.arange(n) % 2 == 0,
            "reward": torch.arange(len(lengths), dtype=torch.float32),
        },
    )


def test_columns_are_checked() -> None:
    b = make([2, 3])
    with pytest.raises(ValueError, match="'advantages': shape"):
        b.with_(advantages=torch.zeros(4))
    with pytest.raises(KeyError, match="catalogue"):
        b.with_(nonsense=torch.zeros(5))
    with pytest.raises(TypeError, match="dtype"):
        b.with_(values=torch.zeros(5, dtype=torch.float64))
    with pytest.raises(KeyError, match="no column 'values'"):
        b["values"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 8), st.randoms())
def test_split_and_join_is_the_identity(lengths: list[int], ranks: int, rnd) -> None:
    b = make(lengths)
    order = list(range(len(lengths)))
    rnd.shuffle(order)
    parts = [order[r::ranks] for r in range(ranks) if order[r::ranks]]
    joined = Batch.concat([b.take(p) for p in parts])
    where = [i for p in parts for i in p]
    back = joined.take([where.index(i) for i in range(len(lengths))])
    assert torch.equal(back.cu_seqlens, b.cu_seqlens)
    for name in b.cols:
        assert torch.equal(back[name], b[name]), name


def test_padded_is_a_view_for_people() -> None:
    b = make([1, 3])
    assert b.padded("token_ids", fill=-1).tolist() == [[0, -1, -1], [1, 2, 3]]


def test_merge_refuses_other_sequences() -> None:
    with pytest.raises(ValueError, match="different sequences"):
        make([2, 3]).merge(make([3, 2]))


def test_trajectories_become_a_batch_with_provenance() -> None:
    prompt = Prompt("a", (5, 6), "hi")
    stop = Trajectory.of(prompt, Completion("r", (7, 2), (-0.5, -0.25), "stop", (3, 3)), "x", group_id=4, sample_id=0)
    cut = Trajectory.of(prompt, Completion("r", (8,), (-1.0,), "length", (3,)), "y", group_id=4, sample_id=1)
    b = Batch.of([stop, cut])
    assert b.cu_seqlens.tolist() == [0, 4, 7]
    assert b["token_ids"].tolist() == [5, 6, 7, 2, 5, 6, 8]
    assert b["loss_mask"].tolist() == [False, False, True, True, False, False, True]
    assert b["rollout_logprobs"].tolist() == [0, 0, -0.5, -0.25, 0, 0, -1.0]
    assert b["group_id"].tolist() == [4, 4] and b["truncated"].tolist() == [False, True]
