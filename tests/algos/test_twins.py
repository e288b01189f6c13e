"""KL estimators against their numpy twins, values and gradients in float64; whitening of a few tokens."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algos.ragged import Ragged, ragged
from tests.reference import algos as twin
from verl.algos.kl import KL_ESTIMATORS, kl_values
from verl.algos.segments import Segments

TOL = {"rtol": 1e-10, "atol": 1e-10}


@settings(max_examples=40, deadline=None)
@given(ragged(), st.sampled_from(KL_ESTIMATORS.names()), st.sampled_from([0.1, 3.0, 100.0]))
def test_kl(x: Ragged, name: str, spread: float) -> None:
    p, q = x.column(spread).requires_grad_(), x.column(spread)
    plain = kl_values(name, p, q)
    np.testing.assert_allclose(plain.detach(), twin.kl(name, p.detach().numpy(), q.numpy()), **TOL)
    (slope,) = torch.autograd.grad(plain.sum(), p)
    np.testing.assert_allclose(slope, twin.kl_slope(name, p.detach().numpy(), q.numpy()), **TOL)
    through = kl_values(name + "+", p, q)
    np.testing.assert_allclose(through.detach(), twin.kl(name, p.detach().numpy(), q.numpy()), rtol=1e-8, atol=1e-8)
    through.sum().backward()
    np.testing.assert_allclose(p.grad, (p - q).detach(), **TOL)


def test_whiten_with_0_1_2_valid_tokens() -> None:
    x = torch.tensor([3.0, 5.0, 9.0], dtype=torch.float64)
    for mask, want in (([0, 0, 0], [0, 0, 0]), ([0, 1, 0], [0, 0, 0]), ([1, 1, 0], [-(0.5**0.5), 0.5**0.5, 0])):
        s = Segments.of(torch.tensor([0, 3]), torch.tensor(mask, dtype=torch.bool))
        np.testing.assert_allclose(s.whiten(x), want, atol=1e-7)
