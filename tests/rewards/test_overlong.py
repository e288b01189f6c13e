"""Soft punishment of long responses."""

import numpy as np
import pytest

from verl.config.reward import OverlongConfig
from verl.rewards.overlong import overlong


def test_the_numbers_of_the_paper():
    """DAPO: 20480 tokens with a buffer of 4096: free up to 16384, then a line down to -1."""
    cfg = OverlongConfig(buffer=0.2, factor=1.0)
    got = overlong([1, 16384, 16385, 18432, 20480], 20480, cfg)
    assert got == pytest.approx([0.0, 0.0, -1 / 4096, -0.5, -1.0], abs=1e-12)


@pytest.mark.parametrize(("buffer", "longest", "factor"), [(0.5, 8, 2.0), (0.01, 8, 1.0), (1.0, 5, 0.25)])
def test_against_a_loop(buffer, longest, factor):
    tokens = max(1, round(buffer * longest))
    want = []
    for length in range(longest + 1):
        over = length - (longest - tokens)
        want.append(-over / tokens * factor if over > 0 else 0.0)
    got = overlong(range(longest + 1), longest, OverlongConfig(buffer=buffer, factor=factor))
    np.testing.assert_allclose(got, want, atol=1e-12)
    assert got[-1] == pytest.approx(-factor)
