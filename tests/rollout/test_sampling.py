"""The sampler alone: its laws, its uniform numbers, its speed path without sorting."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.core import RolloutError, SamplingParams
from verl.engines.rollout.sampling import Draw, invert, sample
from verl.engines.rollout.uniform import uniforms


def law(logits: np.ndarray, p: SamplingParams, banned: tuple[int, ...] = ()) -> np.ndarray:
    """The documented law as a loop in float64: temperature, banned ids, top-k, top-p; ties ranked by id."""
    x = logits.astype(np.float64) / p.temperature
    x[list(banned)] = -np.inf
    mass = np.exp(x - x.max())
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k:
        order = order[: p.top_k]
    total, kept, seen = sum(mass[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        seen += mass[i] / total
        if p.top_p < 1 and seen >= p.top_p:
            break
    out = np.zeros(len(x))
    out[kept] = mass[kept] / mass[kept].sum()
    return out


def test_uniforms_are_splitmix64() -> None:
    """Against the published recurrence in Python integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    def want(seed: int, index: int) -> float:
        start = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
        return (mix((start + (index + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53

    pairs = [(0, 0), (0, 1), (1, 0), (-3, 7), (2**63 - 1, 10**6), (2**70 + 5, 2)]
    got = uniforms([s for s, _ in pairs], [i for _, i in pairs])
    assert got.tolist() == [want(s, i) for s, i in pairs]


def test_uniforms_are_uniform_over_seeds_and_over_indices() -> None:
    for u in (uniforms(range(20000), [0] * 20000), uniforms([7] * 20000, range(20000))):
        counts = np.histogram(u, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square, 19 degrees of freedom: p < 2e-4
    a, b = uniforms(range(20000), [3] * 20000), uniforms(range(1, 20001), [3] * 20000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.7, top_k=6, top_p=0.8),
    ],
    ids=str,
)
@pytest.mark.parametrize("banned", [(), (1, 3)])
def test_frequencies_follow_the_law(params: SamplingParams, banned: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=11).astype(np.float32)
    n = 20000
    tokens, logprobs = [], []
    for start in range(0, n, 4000):
        draws = [Draw("r", SamplingParams(**{**vars(params), "seed": start + i}), 0, banned) for i in range(4000)]
        ids, logps = sample(torch.from_numpy(logits).expand(4000, -1), draws)
        tokens += ids
        logprobs += logps
    want = law(logits, params, banned)
    counts = np.bincount(tokens, minlength=11)
    assert not counts[want == 0].any()
    live = want > 0
    chi2 = ((counts - n * want)[live] ** 2 / (n * want[live])).sum()
    assert chi2 < 40  # at most 10 degrees of freedom: p < 2e-5
    np.testing.assert_allclose(np.exp(logprobs), want[tokens], rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 40), st.sampled_from([0.05, 0.3, 0.9, 0.999, 1.0]), st.booleans())
def test_kept_set_is_the_loops(seed: int, top_k: int, top_p: float, ties: bool) -> None:
    """Each row keeps exactly the documented set, ties included, whatever the other rows ask for."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, 37)).astype(np.float32) * 2
    if ties:
        logits = np.round(logits)
    asks = [
        SamplingParams(top_k=top_k, top_p=top_p, seed=seed),
        SamplingParams(seed=seed),
        SamplingParams(temperature=0),
    ]
    for _ in range(4):
        ids, logps = sample(torch.from_numpy(logits), [Draw("r", p, 0) for p in asks])
        for row, p in enumerate(asks[:2]):
            want = law(logits[row], p)
            assert want[ids[row]] > 0
            assert logps[row] == pytest.approx(np.log(want[ids[row]]), abs=1e-5)
        asks = [SamplingParams(**{**vars(p), "seed": p.seed + 1}) for p in asks]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (700, 1.0), (700, 0.95), (600, 0.3), (3, 1.0)])
def test_wide_vocabulary_where_the_head_is_not_enough(top_k: int, top_p: float) -> None:
    """Nearly flat logits over 2000 tokens: the mass of top-p reaches far beyond the first look."""
    logits = np.random.default_rng(0).normal(size=(1, 2000)).astype(np.float32) * 0.1
    params = SamplingParams(top_k=top_k, top_p=top_p, seed=3)
    want = law(logits[0], params)
    ids, logps = sample(torch.from_numpy(logits), [Draw("r", params, 0)])
    assert logps[0] == pytest.approx(np.log(want[ids[0]]), abs=1e-4)


def test_greedy_is_argmax_with_the_models_own_logprob() -> None:
    x = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    ids, logps = sample(x, [Draw("r", SamplingParams(temperature=0), 0)])
    assert ids == [1] and logps[0] == pytest.approx(float(x.log_softmax(-1)[0, 1]), abs=1e-6)
    ids, logps = sample(x, [Draw("r", SamplingParams(temperature=0), 0, banned=(1,))])
    assert ids == [2] and logps[0] == pytest.approx(float(x.log_softmax(-1)[0, 2]), abs=1e-6)


def test_logits_are_left_as_they_were() -> None:
    x = torch.randn(3, 300)
    before = x.clone()
    sample(x, [Draw("r", SamplingParams(temperature=0.5, top_k=2), 0, (0,))] * 3)
    assert torch.equal(x, before)


def test_inversion_never_returns_a_token_without_mass() -> None:
    mass = torch.zeros(4, 1000)
    mass[:, 300] = 1e-30
    mass[:, 999] = 1.0
    mass[3, 999] = 0.0
    u = torch.tensor([0.0, 1 - 2**-53, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert invert(mass, u).tolist() == [300, 999, 999, 300]


def test_inversion_follows_the_running_sum() -> None:
    mass = torch.rand(50, 3001)
    u = torch.rand(50, dtype=torch.float64)
    ends = mass.double().cumsum(-1)
    ends /= ends[:, -1:].clone()
    got = invert(mass, u)
    below = torch.where(got > 0, ends.gather(1, (got - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    above = ends.gather(1, got[:, None])[:, 0]
    assert bool(((below - 1e-6 <= u) & (u < above + 1e-6)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_name_the_request(bad: float) -> None:
    x = torch.zeros(2, 5)
    x[1, 2] = bad
    with pytest.raises(RolloutError, match=r"'second'.*not finite"):
        sample(x, [Draw("first", SamplingParams(), 0), Draw("second", SamplingParams(), 0)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_only_end_tokens_have_mass_min_tokens_is_named(temperature: float) -> None:
    """A model may give all the rest -inf; that is no sign of diverged weights."""
    logits = torch.full((3, 9), float("-inf"))
    logits[:, 4] = 1.0
    params = SamplingParams(temperature, min_tokens=2)
    free, tied = Draw("a", params, 2), Draw("b", params, 1, banned=(4,))
    assert sample(logits[:1], [free]) == ([4], [0.0])
    with pytest.raises(RolloutError, match=r"request 'b': nothing can be drawn.*min_tokens"):
        sample(logits, [free, tied, free])
    logits[1] = float("nan")
    with pytest.raises(RolloutError, match=r"request 'b'.*not finite"):
        sample(logits, [free, tied, free])


def test_a_top_k_beyond_any_vocabulary_keeps_all() -> None:
    logits = torch.randn(2, 9)
    whole, cut = (Draw("a", SamplingParams(top_k=k, top_p=0.9), 0) for k in (0, 10**30))
    assert sample(logits, [whole] * 2) == sample(logits, [cut] * 2)
