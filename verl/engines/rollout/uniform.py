"""Uniform numbers as a pure function of (seed, token index): no generator state, so no batch can disturb a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """[B] numbers in [0, 1), one for token `indices[b]` of the request with `seeds[b]` (any Python integers).

    Source: splitmix64 (Steele, Lea and Flood 2014) used as a counter-based hash: the seed is mixed once to spread
    neighbouring seeds, then each index is mixed as one step of the stream that starts there.
    """
    start = _mix(np.array([s & _MASK for s in seeds], dtype=np.uint64) + _GOLDEN)
    count = np.array(indices, dtype=np.uint64) + np.uint64(1)
    return (_mix(start + count * _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser; arithmetic wraps at 64 bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
