"""What the papers say of each policy loss: where it clips, what it is on policy, that nothing overflows."""

import math

import numpy as np
import pytest
import torch

from tests.algos.one_loss import WITH_RATIO, loss_of, move, row, slope
from verl.algos.aggregate import Aggregation, Denominators
from verl.algos.policy_losses import PolicyInputs
from verl.algos.segments import Segments


@pytest.mark.parametrize("name", WITH_RATIO)
def test_on_policy_it_is_reinforce(name: str) -> None:
    """At ratio 1 every surrogate has the gradient of -A l; advantages here are those of whole sequences."""
    now = np.random.default_rng(2).normal(-1.0, 0.4, 12).tolist()
    x = row(now, now, [a for a in (1.3, -0.7, 0.4) for _ in range(4)], seqs=3)
    given = {"cov_low": 0.0} if name == "clip_cov" else {}
    loss, metrics, chosen = loss_of(name, x, **given)
    want = -x.advantages
    if name == "clip_cov":  # but for the token that it chose
        assert chosen is not None and chosen.sum() == 1
        want = torch.where(chosen, 0.0, want)
    elif "actor/clip_fraction" in metrics:
        assert metrics["actor/clip_fraction"][1] == 0
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), x.logprobs)[0], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", WITH_RATIO)
@pytest.mark.parametrize("gap", [-100.0, -30.0, 30.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_at_any_gap(name: str, gap: float, dtype: torch.dtype) -> None:
    new = torch.full((6,), -0.5 + min(gap, 0.0), dtype=dtype, requires_grad=True)
    old = torch.full((6,), -0.5 - max(gap, 0.0), dtype=dtype)
    s = Segments.of(torch.tensor([0, 2, 4, 6]), torch.ones(6, dtype=torch.bool))
    adv = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, -2.0], dtype=dtype)
    loss, metrics, _ = loss_of(name, PolicyInputs(s, new, old, adv))
    loss.sum().backward()
    assert new.grad is not None and torch.isfinite(loss).all() and torch.isfinite(new.grad).all()
    assert all(math.isfinite(v) for v in metrics.values_by_name().values())
    assert loss.dtype == dtype


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [
        (1.279, 1, False),
        (1.281, 1, True),
        (0.5, 1, False),
        (0.801, -1, False),
        (0.799, -1, True),
        (1.5, -1, False),
        (30.0, -1, False),
    ],
)
def test_dapo_clips_at_its_bounds(ratio: float, advantage: float, cut: bool) -> None:
    got = slope("ppo_clip", move(ratio, advantage, 0.02), clip_low=0.2, clip_high=0.28, dual_clip=None)
    assert got == pytest.approx([0.0 if cut else -advantage * ratio])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    for ratio, advantage, want in ((2.99, -2.0, 5.98), (3.01, -2.0, 0.0), (50.0, -2.0, 0.0), (0.1, 2.0, -0.2)):
        assert slope("ppo_clip", move(ratio, advantage, 0.01)) == pytest.approx([want])


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [
        (1 + 3.9e-4, 1, False),
        (1 + 4.1e-4, 1, True),
        (0.9, 1, False),
        (1 - 2.9e-4, -1, False),
        (1 - 3.1e-4, -1, True),
        (1.1, -1, False),
    ],
)
def test_gspo_clips_whole_sequences_by_their_geometric_mean(ratio: float, advantage: float, cut: bool) -> None:
    far = [0.5, -0.9, 0.4]  # each token is far outside; only their mean counts
    now = [-1.5 + f + math.log(ratio) for f in far]
    x = row([*now, -1.0, -1.0, -1.0], [-1.5] * 3 + [-1.0] * 3, [advantage] * 6, seqs=2)
    got = slope("gspo", x)
    assert got[:3] == pytest.approx([0.0 if cut else -advantage * ratio] * 3)
    assert got[3:] == pytest.approx([-advantage] * 3)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_caps_the_weight_and_keeps_the_gradient(advantage: float) -> None:
    for ratio, weight in ((4.99, 4.99), (5.01, 5.0), (40.0, 5.0), (0.01, 0.01)):
        x = move(ratio, advantage, 0.02)
        assert slope("cispo", x) == pytest.approx([-advantage * weight])
        assert loss_of("cispo", x)[1]["actor/clip_fraction"][1] == (ratio > 5)
    low = slope("cispo", move(0.5, advantage), clip_low=0.2)
    assert low == pytest.approx([-advantage * 0.8])


def test_geo_mean_clips_each_log_ratio_on_one_side() -> None:
    for gap, advantage, cut in (
        (0.399, 1, False),
        (0.401, 1, True),
        (-5.0, 1, False),
        (-0.399, -1, False),
        (-0.401, -1, True),
        (2.0, -1, False),
    ):
        x = row([-3.0 + gap, -3.0], [-3.0, -3.0], [advantage] * 2)
        kept = math.copysign(0.4, gap) if cut else gap
        both = -advantage * math.exp(kept / 2)
        assert slope("geo_mean", x) == pytest.approx([0.0 if cut else both, both])


def test_geo_mean_is_the_papers_mean_over_sequences() -> None:
    x = row([-1.0, -1.2, -0.7, -2.0, -1.0, -1.1], [-1.1, -1.1, -0.9, -1.9, -1.1, -1.1], [1, 1, 1, -2, -2, -2], seqs=2)
    loss, _, _ = loss_of("geo_mean", x)
    got = Aggregation("seq_mean_token_mean")(loss, x.segments, Denominators.of(x.segments))
    gap = (x.logprobs - x.old_logprobs).view(2, 3)
    want = -(gap.mean(1).exp() * torch.tensor([1.0, -2.0])).mean()
    torch.testing.assert_close(got, want.detach().expand_as(got), check_dtype=False)


def test_dppo_tv_bounds_the_move_of_the_probability() -> None:
    """A rare token may multiply its probability; a common one may not move by a fifth."""
    for now, before, advantage, cut in (
        (0.699, 0.5, 1, False),
        (0.701, 0.5, 1, True),
        (0.1, 0.5, 1, False),
        (0.301, 0.5, -1, False),
        (0.299, 0.5, -1, True),
        (0.9, 0.5, -1, False),
        (0.01, 0.001, 1, False),
    ):
        got = slope("dppo_tv", move(now / before, advantage, before))
        assert got == pytest.approx([0.0 if cut else -advantage * now / before])


def test_dppo_kl_bounds_the_divergence_but_not_the_way_back() -> None:
    def divergence(p: float, q: float) -> float:
        return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))

    assert divergence(0.65, 0.5) < 0.05 < divergence(0.66, 0.5)
    for now, advantage, cut in (
        (0.65, 1, False),
        (0.66, 1, True),
        (0.1, 1, False),
        (0.35, -1, False),
        (0.34, -1, True),
    ):
        got = slope("dppo_kl", move(now / 0.5, advantage, 0.5))
        assert got == pytest.approx([0.0 if cut else -advantage * now / 0.5])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_weight_is_capped(name: str) -> None:
    for cap, weight in ((20.0, 20.0), (None, 30.0)):
        x = move(30.0, 1.0, 1e-4)
        assert slope(name, x, dual_clip=cap) == pytest.approx([-weight])
    assert loss_of(name, move(30.0, 1.0, 1e-4))[1]["actor/dual_clip_fraction"] == ("mean", 1.0, 1.0)


def test_sapo_fades_on_both_sides_and_faster_for_negative_advantages() -> None:
    def felt(ratio: float, advantage: float) -> float:
        return slope("sapo", move(ratio, advantage, 0.1))[0] / -(advantage * ratio)

    for advantage in (1.0, -1.0):
        assert felt(1.0, advantage) == pytest.approx(1.0)
        assert 1 > felt(1.5, advantage) > felt(3.0, advantage) > 0
        assert felt(0.5, advantage) == pytest.approx(felt(1.5, advantage))
    assert felt(2.0, -1.0) < felt(2.0, 1.0)


def test_dro_rests_where_the_log_prob_has_moved_by_advantage_over_beta() -> None:
    x = row([-3.0 + 0.1 / 0.05], [-3.0], [0.1])
    assert slope("dro", x) == pytest.approx([0.0], abs=1e-12)
