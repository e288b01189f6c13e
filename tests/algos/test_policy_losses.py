"""Every policy loss against its numpy twin over ragged batches: value, gradient, metrics, and the tokens it chooses."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.one_loss import WITH_RATIO, config, loss_of, row
from tests.algos.ragged import Ragged, ragged
from tests.reference import policy_losses as twin
from verl.algos.policy_losses import POLICY_LOSSES, ClipCov, KLCov, PolicyInputs, choose_clip_cov, choose_kl_cov
from verl.algos.segments import Segments
from verl.core.errors import ConfigError
from verl.core.rng import stream

TOL = {"rtol": 1e-10, "atol": 1e-10}
CONSTANTS: dict[str, list[dict[str, Any]]] = {
    "ppo_clip": [{"clip_low": 0.2, "clip_high": 0.3, "dual_clip": d} for d in (None, 1.5, 3.0)],
    "gspo": [{"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 0.5, "clip_high": 1.5}],
    "cispo": [{"clip_low": 1.0, "clip_high": 4.0}, {"clip_low": 0.3, "clip_high": 0.2}],
    "sapo": [{"tau_pos": 1.0, "tau_neg": 1.05}, {"tau_pos": 0.3, "tau_neg": 4.0}],
    "gpg": [{}],
    "reinforce": [{}],
    "dro": [{"beta": 0.05}, {"beta": 2.0}],
    "geo_mean": [{"clip_low": 0.4, "clip_high": 0.4}, {"clip_low": 0.1, "clip_high": 2.0}],
    "clip_cov": [
        {"clip_low": 0.2, "clip_high": 0.3, "cov_ratio": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
        {"clip_low": 0.9, "clip_high": 9.0, "cov_ratio": 0.4, "cov_low": -0.5, "cov_high": 50.0},
    ],
    "kl_cov": [{"cov_ratio": 2e-4, "kl_coef": 0.1}, {"cov_ratio": 0.5, "kl_coef": 3.0}],
    "dppo_tv": [{"clip_low": 0.2, "clip_high": 0.2, "dual_clip": d} for d in (None, 1.1, 20.0)],
    "dppo_kl": [{"eps": 0.05, "dual_clip": d} for d in (None, 1.1, 20.0)],
}
CASES = [(name, given) for name, all_given in CONSTANTS.items() for given in all_given]


def test_every_loss_has_a_twin_here() -> None:
    assert sorted(CONSTANTS) == POLICY_LOSSES.names()


@pytest.mark.parametrize(("name", "given_constants"), CASES, ids=lambda v: v if isinstance(v, str) else "")
@settings(max_examples=40, deadline=None)
@given(x=ragged(), spread=st.sampled_from([0.3, 3.0, 60.0]))
def test_value_gradient_and_metrics(name: str, given_constants: dict[str, Any], x: Ragged, spread: float) -> None:
    new, old, adv = -x.column(spread).abs(), -x.column(spread).abs(), x.column()
    adv = torch.where(x.column() > 1.5, 0.0, adv)
    weight = x.column()
    leaf = new.clone().requires_grad_()
    inputs = PolicyInputs(x.segments, leaf, old, adv)
    loss, metrics, chosen = loss_of(name, inputs, seed=3, **given_constants)
    loss.backward(weight)
    plain = [c.numpy() for c in (new, old, adv)]
    args = [*plain, x.mask, x.segments.seq.tolist()]
    if chosen is not None:
        args.append(set(torch.nonzero(chosen).flatten().tolist()))
    want, slopes, cut = getattr(twin, name)(*args, **given_constants)
    np.testing.assert_allclose(loss.detach(), want, **TOL)
    down = weight.numpy() * slopes if slopes.ndim == 1 else weight.numpy() @ slopes
    np.testing.assert_allclose(leaf.grad, down, **TOL)
    n = int(x.mask.sum())
    assert ("actor/approx_kl" in metrics) == (name in WITH_RATIO)
    assert ("actor/clip_fraction" in metrics) == (cut is not None)
    if name in WITH_RATIO:
        gap = np.where(x.mask, plain[1] - plain[0], 0.0).sum()
        assert metrics["actor/approx_kl"] == ("mean", pytest.approx(gap), n)
    if cut is not None:
        assert metrics["actor/clip_fraction"] == ("mean", cut.sum(), n)
    if chosen is not None:
        assert metrics["actor/cov_fraction"] == ("mean", int(chosen.sum()), n)


@pytest.mark.parametrize("given_constants", CONSTANTS["clip_cov"])
@settings(max_examples=60, deadline=None)
@given(x=ragged(), spread=st.sampled_from([0.3, 3.0, 60.0]), seed=st.integers(0, 9))
def test_clip_cov_chooses(given_constants: dict[str, Any], x: Ragged, spread: float, seed: int) -> None:
    new, old, adv = x.column(spread), x.column(spread), x.column()
    got = choose_clip_cov(PolicyInputs(x.segments, new, old, adv), ClipCov(**given_constants), seed)
    draws = stream(seed, "clip_cov").random(int(x.mask.sum()))
    want = twin.choose_clip_cov(*(c.numpy() for c in (new, old, adv)), x.mask, draws, **given_constants)
    assert set(torch.nonzero(got).flatten().tolist()) == want
    assert got.shape == x.mask.shape and got.dtype == torch.bool


@pytest.mark.parametrize("ratio", [2e-4, 0.3, 1.0])
@settings(max_examples=60, deadline=None)
@given(x=ragged(), spread=st.sampled_from([0.3, 3.0, 60.0]))
def test_kl_cov_chooses(ratio: float, x: Ragged, spread: float) -> None:
    new, adv = x.column(spread), x.column()
    got = choose_kl_cov(PolicyInputs(x.segments, new, new, adv), KLCov(cov_ratio=ratio), 0)
    want = twin.choose_kl_cov(new.numpy(), adv.numpy(), x.mask, cov_ratio=ratio)
    assert set(torch.nonzero(got).flatten().tolist()) == want
    assert got.sum() == (max(1, int(ratio * x.mask.sum())) if x.mask.any() else 0)


def test_kl_cov_takes_the_earlier_of_equals() -> None:
    x = row([-1.0, -1.0, -2.0, -2.0], [-1.0] * 4, [1.0, 1.0, -1.0, -1.0])
    got = choose_kl_cov(x, KLCov(cov_ratio=0.5), 0)
    assert got.tolist() == [True, True, False, False]


def test_clip_cov_choice_is_random_by_seed_and_of_the_stated_number() -> None:
    rng = np.random.default_rng(0)
    now = rng.normal(size=1000).tolist()
    x = row(now, now, rng.normal(size=1000).tolist())
    c = ClipCov(cov_ratio=0.02, cov_low=0.5, cov_high=5.0)
    picks = [choose_clip_cov(x, c, seed) for seed in (0, 0, 1)]
    assert [int(p.sum()) for p in picks] == [20, 20, 20]
    assert torch.equal(picks[0], picks[1]) and not torch.equal(picks[0], picks[2])
    a, now_t = x.advantages - x.advantages.mean(), x.old_logprobs - x.old_logprobs.mean()
    able = (a * now_t > 0.5) & (a * now_t < 5.0)
    often = torch.stack([choose_clip_cov(x, c, seed) for seed in range(400)]).double().mean(0)
    fair = 20 / float(able.sum())
    assert not often[~able].any() and (often[able] - fair).abs().max() < 5 * (fair / 400) ** 0.5


def test_padding_changes_no_choice() -> None:
    rng = np.random.default_rng(1)
    mask = rng.random(60) < 0.7
    new, old, adv = (torch.from_numpy(rng.normal(size=60)) for _ in range(3))
    tight = Segments.of(torch.tensor([0, int(mask.sum())]), torch.ones(int(mask.sum()), dtype=torch.bool))
    loose = Segments.of(torch.tensor([0, 25, 60]), torch.from_numpy(mask))
    for name in ("clip_cov", "kl_cov"):
        entry, c = POLICY_LOSSES[name], config(name, **CONSTANTS[name][1])
        assert entry.prepare is not None
        short = entry.prepare(PolicyInputs(tight, new[mask], old[mask], adv[mask]), c, 4)
        long = entry.prepare(PolicyInputs(loose, new, old, adv), c, 4)
        assert short.any() and torch.equal(long[mask], short) and not long[~mask].any()


@pytest.mark.parametrize(
    ("name", "given_constants", "word"),
    [
        ("cispo", {"clip_low": 1.1}, r"cispo\.clip_low: .*less than or equal to 1, got 1\.1"),
        ("dro", {"beta": 0.0}, r"dro\.beta: .*greater than 0"),
        ("dppo_tv", {"dual_clip": 0.5}, r"dppo_tv\.dual_clip: .*greater than 1"),
        ("clip_cov", {"cov_low": 6.0}, r"clip_cov\.cov_high: .*above cov_low, which is 6\.0, got 5\.0"),
        ("kl_cov", {"kl_cof": 1.0}, r"kl_cov\.kl_cof: unknown key \(did you mean 'kl_coef'"),
        ("reinforce", {"beta": 1.0}, "'reinforce' has no constants"),
    ],
)
def test_a_wrong_constant_is_one_line(name: str, given_constants: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config(name, **given_constants)


def test_every_constant_is_documented() -> None:
    for entry in POLICY_LOSSES:
        for field in (entry.config.model_fields if entry.config else {}).values():
            assert field.description, entry.name
