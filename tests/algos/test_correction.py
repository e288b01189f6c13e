"""Rollout correction, its metrics and pass@k against plain loops; partials that merge; errors that name the field."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.ragged import Ragged, ragged
from tests.reference import correction as twin
from verl.algos.correction import check_correction, effective_sample_size, importance_weights, kept, mismatch
from verl.algos.pass_at_k import pass_at_k
from verl.algos.segments import Segments
from verl.config.algorithm import CorrectionConfig
from verl.core.errors import ConfigError
from verl.core.metrics import Metrics

TOL = {"rtol": 1e-10, "atol": 1e-10}
SPREAD = st.sampled_from([0.1, 1.0, 60.0])


@settings(max_examples=150, deadline=None)
@given(
    ragged(), SPREAD, st.sampled_from(["off", "token", "sequence"]), st.sampled_from(["tis", "icepop"]), st.booleans()
)
def test_weights(x: Ragged, spread: float, level: str, kind: str, normalize: bool) -> None:
    old, rollout = x.column(spread).requires_grad_(), x.column(spread)
    cfg = CorrectionConfig(level=level, kind=kind, normalize=normalize, cap=1.5, low=0.6, high=3.0)
    got = importance_weights(x.segments, old, rollout, cfg)
    assert not got.requires_grad
    np.testing.assert_allclose(got, twin.weights(x.rows(old.detach(), rollout), cfg), **TOL)


@settings(max_examples=200, deadline=None)
@given(
    ragged(),
    SPREAD,
    st.sampled_from(["off", "token", "sequence_sum", "sequence_mean", "sequence_max"]),
    st.sampled_from(["k1", "k2", "k3"]),
    st.booleans(),
)
def test_kept(x: Ragged, spread: float, reject: str, statistic: str, low: bool) -> None:
    old, rollout = x.column(spread), x.column(spread)
    bounds = {} if reject == "off" else {"reject_high": 1.3, "reject_low": 0.4 if low and statistic == "k1" else None}
    cfg = CorrectionConfig(reject=reject, statistic=statistic, **bounds)
    if reject != "off":
        check_correction(cfg)
    got = kept(x.segments, old, rollout, cfg)
    assert got.dtype == torch.bool
    assert got.tolist() == twin.kept(x.rows(old, rollout), cfg)


def test_k1_bounds_are_on_the_ratio_not_its_inverse() -> None:
    s = Segments(torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.bool), 3)
    ratio = torch.tensor([0.45, 1.9, 1.0]).double()
    cfg = CorrectionConfig(reject="token", reject_low=0.4, reject_high=1.5)
    assert kept(s, ratio.log(), torch.zeros(3).double(), cfg).tolist() == [True, False, True]


@settings(max_examples=40, deadline=None)
@given(ragged(), st.sampled_from([float("nan"), float("inf"), -1e30]))
def test_poison_at_masked_positions_changes_nothing(x: Ragged, poison: float) -> None:
    old, rollout = x.column(), x.column()
    bad = x.poisoned(old, poison), x.poisoned(rollout, poison)
    for level in ("token", "sequence"):
        cfg = CorrectionConfig(level=level, normalize=True, reject="sequence_sum", reject_high=1.5)
        for f in (importance_weights, kept):
            assert torch.equal(f(x.segments, old, rollout, cfg), f(x.segments, *bad, cfg))
    assert mismatch(x.segments, old, rollout) == mismatch(x.segments, *bad)


@settings(max_examples=60, deadline=None)
@given(ragged(), st.integers(1, 4), SPREAD)
def test_mismatch_of_parts_is_that_of_the_whole(x: Ragged, parts: int, spread: float) -> None:
    old, rollout, s = x.column(spread), x.column(spread), x.segments
    whole = mismatch(s, old, rollout).values_by_name()
    pieces = []
    for part in range(parts):
        mine = s.seq % parts == part
        pieces.append(mismatch(Segments(s.seq[mine], s.mask[mine], s.num_seqs), old[mine], rollout[mine]))
    merged = Metrics.merge(pieces).values_by_name()
    assert merged == pytest.approx(whole, rel=1e-12)
    xs = [d for row in x.rows(old, rollout) for d in twin.gaps(*row)]
    if not xs:
        assert effective_sample_size(merged) is None
        return
    w = np.exp(np.clip(xs, -20, 20))
    want = {
        "rollout/logprob_gap": np.mean(np.abs(xs)),
        "rollout/logprob_gap_max": np.max(np.abs(xs)),
        "rollout/k3": np.mean(w - 1 - np.array(xs)),
        "rollout/weight": np.mean(w),
        "rollout/weight_square": np.mean(w**2),
    }
    assert merged == pytest.approx(want, rel=1e-10)
    assert effective_sample_size(merged) == pytest.approx(1 / np.mean((w / w.mean()) ** 2))


def test_no_mismatch_is_an_effective_sample_size_of_one() -> None:
    s = Segments(torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool), 1)
    x = torch.tensor([-1.0, -2.0, -3.0])
    values = mismatch(s, x, x).values_by_name()
    assert effective_sample_size(values) == 1.0 and values["rollout/k3"] == 0.0


def test_mean_weight_is_over_counted_tokens_or_sequences() -> None:
    """Ratios 2 and 1 of row 0, 4 of row 1; row 2 is masked. Tokens: mean 7/3; sequences 2 and 4: mean 3."""
    s = Segments(torch.tensor([0, 0, 1, 2]), torch.tensor([1, 1, 1, 0]).bool(), 3)
    old = torch.tensor([2.0, 1.0, 4.0, 9.0], dtype=torch.float64).log()
    for level, want in (("token", [6 / 7, 3 / 7, 12 / 7, 0.0]), ("sequence", [2 / 3, 2 / 3, 4 / 3, 0.0])):
        cfg = CorrectionConfig(level=level, cap=10.0, normalize=True)
        np.testing.assert_allclose(importance_weights(s, old, torch.zeros_like(old), cfg), want, **TOL)


def test_all_weights_zero_stay_zero_when_normalized() -> None:
    s = Segments(torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool), 2)
    for level in ("token", "sequence"):
        cfg = CorrectionConfig(level=level, kind="icepop", normalize=True)
        assert importance_weights(s, torch.full((3,), 9.0), torch.zeros(3), cfg).tolist() == [0.0, 0.0, 0.0]


def test_float32_stays_finite_at_gaps_of_100() -> None:
    s = Segments(torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), 2)
    old, rollout = torch.tensor([0.0, 0.0, -100.0, -100.0]), torch.tensor([-100.0, -100.0, 0.0, 0.0])
    for level in ("token", "sequence"):
        w = importance_weights(s, old, rollout, CorrectionConfig(level=level, cap=1e9))
        assert w.dtype == torch.float32 and torch.isfinite(w).all()
    assert all(np.isfinite(v) for v in mismatch(s, old, rollout).values_by_name().values())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"reject": "token"}, "reject_high"),
        ({"reject": "token", "statistic": "k2", "reject_high": 1.0, "reject_low": 0.5}, "reject_low"),
        ({"reject": "token", "statistic": "k3", "reject_high": 1.0, "reject_low": 0.5}, "reject_low"),
        ({"reject": "token", "reject_high": 1.0, "reject_low": 2.0}, "reject_low"),
        ({"reject": "token", "reject_high": 0.5}, "reject_high"),
        ({"reject_high": 2.0}, "reject_high"),
        ({"reject_low": 0.5}, "reject_low"),
        ({"level": "token", "kind": "icepop", "low": 3.0, "high": 2.0}, "low"),
        ({"reject": "token", "reject_low": 0.1, "reject_high": 0.9}, "reject_high"),
        ({"level": "token", "kind": "icepop", "low": 2.0}, "low"),
        ({"level": "token", "kind": "icepop", "high": 0.9}, "high"),
        ({"level": "token", "kind": "icepop", "cap": 3.0}, "cap"),
        ({"level": "token", "low": 0.1}, "low"),
        ({"cap": 3.0}, "cap"),
        ({"kind": "icepop"}, "kind"),
        ({"statistic": "k2"}, "statistic"),
        ({"normalize": True}, "normalize"),
        ({"level": "token", "old_logprobs": "bypass"}, "level"),
        ({"reject": "token", "reject_high": 2.0, "old_logprobs": "bypass"}, "reject"),
    ],
)
def test_senseless_values_are_refused_with_their_path(values: dict, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.rollout_correction\.{field}: [^\n]+$"):
        check_correction(CorrectionConfig(**values))


def test_sensible_values_pass() -> None:
    check_correction(CorrectionConfig())
    check_correction(CorrectionConfig(level="sequence", kind="icepop", normalize=True))
    check_correction(CorrectionConfig(reject="sequence_mean", reject_high=1.001))
    check_correction(CorrectionConfig(reject="token", reject_low=0.1, reject_high=1.0))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_pass_at_k(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, c, k)
    assert isinstance(value, float)
    assert value == pytest.approx(twin.pass_at_k(n, c, k), rel=1e-10, abs=1e-12)


def test_pass_at_k_of_arrays_tensors_and_large_numbers() -> None:
    want = [pass_at_k(8, c, 3) for c in (0, 2, 8)]
    assert want == pytest.approx([0.0, 1 - 20 / 56, 1.0])
    array = pass_at_k(8, np.array([0, 2, 8]), 3)
    np.testing.assert_allclose(array, want)
    tensor = pass_at_k(torch.tensor([8, 8, 8]), torch.tensor([0, 2, 8]), 3)
    assert tensor.dtype == torch.float64 and tensor.tolist() == want
    assert pass_at_k(100_000, 1, 1000) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("n", "c", "k", "words"),
    [
        (4, 2, 5, "k=5"),
        (4, 5, 2, "between 0 and n"),
        (4, -1, 2, "between 0 and n"),
        (4, 2, 0, "at least 1"),
        (-3, 0, 1, "n=-3"),
        (4.5, 2, 1, "n must be an integer"),
        (4, 2, 1.5, "k must be an integer"),
    ],
)
def test_pass_at_k_refuses(n: float, c: int, k: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pass_at_k(n, c, k)
