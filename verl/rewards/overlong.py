"""Soft punishment of long responses."""

from __future__ import annotations

from collections.abc import Sequence

from verl.config.reward import OverlongConfig


def overlong(lengths: Sequence[int], longest: int, cfg: OverlongConfig) -> list[float]:
    """min(-(length - (longest - buffer)) / buffer * factor, 0) of each response (DAPO, arXiv:2503.14476, eq. 13).

    lengths: response tokens; longest: rollout.max_response_tokens. buffer: cfg.buffer * longest, at least one token.
    """
    buffer = max(1, round(cfg.buffer * longest))
    return [min(-(length - (longest - buffer)) / buffer * cfg.factor, 0.0) for length in lengths]
