"""From token losses to one number, and the value loss: against plain loops, and unchanged by any split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.ragged import Ragged, ragged
from tests.reference import aggregate as twin
from verl.algos.aggregate import MODES, Aggregation, Denominators, tokens_per_prompt
from verl.algos.segments import Segments
from verl.algos.value_loss import value_loss
from verl.core.errors import ConfigError

TOL = {"rtol": 1e-10, "atol": 1e-10}


@settings(max_examples=60, deadline=None)
@given(ragged(), st.sampled_from(MODES), st.booleans())
def test_aggregation(x: Ragged, mode: str, grouped: bool) -> None:
    loss, s = x.column(), x.segments
    group = torch.from_numpy(x.group) if grouped else torch.arange(len(x.lengths))
    got = Aggregation(mode, 16)(loss, s, Denominators.of(s, group), tokens_per_prompt(s, group))
    want = twin.aggregate(x.rows(loss), mode, 16, group.tolist())
    np.testing.assert_allclose(got, want, **TOL)


@settings(max_examples=60, deadline=None)
@given(ragged(max_seqs=8), st.sampled_from(MODES), st.integers(1, 4))
def test_aggregation_of_parts_is_that_of_the_whole(x: Ragged, mode: str, parts: int) -> None:
    """Parts cut through the groups of a prompt, too."""
    loss, s = x.column(), x.segments
    group = torch.from_numpy(x.group)
    total, per_prompt = Denominators.of(s, group), tokens_per_prompt(s, group)
    whole = Aggregation(mode, 16)(loss, s, total, per_prompt)
    cut = np.arange(len(x.lengths)) % parts
    summed = torch.zeros((), dtype=torch.float64)
    for part in range(parts):
        tokens = torch.from_numpy(cut)[s.seq] == part
        mine = [n for n, c in zip(x.lengths, cut, strict=True) if c == part]
        if mine:
            seg = Segments.of(torch.tensor([0, *np.cumsum(mine)]), s.mask[tokens])
            summed = summed + Aggregation(mode, 16)(loss[tokens], seg, total, per_prompt[torch.from_numpy(cut == part)])
    np.testing.assert_allclose(summed, whole, **TOL)


@pytest.mark.parametrize("mode", MODES)
def test_poison_and_nothing_counted(mode: str) -> None:
    s = Segments(torch.tensor([0, 0, 1]), torch.tensor([True, False, True]), 3)
    group = torch.tensor([7, 7, 9])
    loss = torch.tensor([2.0, float("nan"), 4.0])
    value = Aggregation(mode, 2)(loss, s, Denominators.of(s, group), tokens_per_prompt(s, group))
    assert torch.isfinite(value) and value > 0
    none = Segments(s.seq, torch.zeros(3, dtype=torch.bool), 3)
    assert Aggregation(mode, 2)(loss, none, Denominators.of(none, group), tokens_per_prompt(none, group)) == 0


def test_prompt_mean_by_hand() -> None:
    """Prompt 5 has tokens 1, 2, 6 (mean 3), prompt 4 has token 9, prompt 8 has none: (3 + 9) / 2."""
    s = Segments(torch.tensor([0, 0, 1, 2, 3]), torch.tensor([1, 1, 1, 1, 0]).bool(), 4)
    group = torch.tensor([5, 4, 5, 8])
    total = Denominators.of(s, group)
    assert total == Denominators(tokens=4.0, seqs=3.0, prompts=2.0)
    assert tokens_per_prompt(s, group).tolist() == [3, 1, 3, 0]
    loss = torch.tensor([1.0, 2.0, 9.0, 6.0, 100.0])
    assert float(Aggregation("prompt_mean")(loss, s, total, tokens_per_prompt(s, group))) == pytest.approx(6.0)


def test_without_groups_each_sequence_is_its_own_prompt() -> None:
    s = Segments(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 1]).bool(), 2)
    assert Denominators.of(s).prompts == 2.0


def test_errors_name_the_field_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.aggregation: unknown mode 'token_maen' \(did you mean"):
        Aggregation("token_maen")
    with pytest.raises(ConfigError, match=r"aggregation_length: needed.*length=.*rollout\.max_response_tokens"):
        Aggregation("seq_mean_token_sum_norm", None)


@settings(max_examples=60, deadline=None)
@given(ragged(), st.floats(0.05, 1.0))
def test_value_loss(x: Ragged, clip: float) -> None:
    v, old, target = x.column().requires_grad_(), x.column(), x.column()
    loss, metrics = value_loss(x.segments, v, old, target, clip)
    want, slope = twin.value_loss(v.detach().numpy(), old.numpy(), target.numpy(), x.mask, clip)
    np.testing.assert_allclose(loss.detach(), want, **TOL)
    loss.sum().backward()
    np.testing.assert_allclose(v.grad, slope, **TOL)
    assert metrics["critic/clip_fraction"][2] == x.mask.sum()


def test_value_loss_poison_changes_nothing() -> None:
    s = Segments(torch.zeros(3, dtype=torch.long), torch.tensor([True, True, False]), 1)
    clean, dirty = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, float("nan")])
    grads = []
    for x in (clean, dirty):
        v = x.clone().requires_grad_()
        loss, _ = value_loss(s, v, 0.5 * x, 2.0 * x, 0.5)
        loss.sum().backward()
        grads.append((loss.detach(), v.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
