"""Whether the memory that an engine is granted is enough and is there; asked before a model loads as well. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from verl.core import ConfigError
from verl.engines.rollout.prefixes import BLOCK

if TYPE_CHECKING:
    from verl.models.config import DecoderConfig

GRAIN = 16
"""Slots hold a multiple of this many tokens."""


def rounded(tokens: int) -> int:
    """The next multiple of GRAIN."""
    return tokens + -tokens % GRAIN


def bytes_of(gb: float) -> int:
    """10^9 bytes each, exactly, however many."""
    return round(Fraction(float(gb)) * 10**9)


def token_bytes(shape: DecoderConfig, width: int) -> int:
    """Keys and values of one token, all layers. width: bytes of a number."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width


@dataclass(frozen=True)
class Grant:
    """rollout.kv_cache_gb and rollout.prefix_cache_gb, as there."""

    kv_cache_gb: float | None
    prefix_cache_gb: float

    def check(self, token_bytes: int, have_gb: float, longest: int = 1) -> None:
        """ConfigError, which names the value to change, where not one sequence of `longest` tokens would fit, where the
        prefix cache could not keep a block, or where it is larger than the `have_gb` of the device.
        """
        slot = rounded(longest) * token_bytes
        if self.kv_cache_gb is not None and bytes_of(self.kv_cache_gb) < slot:
            raise ConfigError(
                f"rollout.kv_cache_gb: {self.kv_cache_gb} does not hold one sequence of {longest} tokens; set it to "
                f"{slot / 1e9} or more, or to null for no limit, or lower rollout.max_response_tokens or "
                "eval.max_response_tokens"
            )
        if self.prefix_cache_gb > 0 and bytes_of(self.prefix_cache_gb) < BLOCK * token_bytes:
            raise ConfigError(
                f"rollout.prefix_cache_gb: {self.prefix_cache_gb} must be 0, or enough for {BLOCK} tokens: "
                f"{BLOCK * token_bytes / 1e9} or more"
            )
        if self.prefix_cache_gb > have_gb:
            raise ConfigError(
                f"rollout.prefix_cache_gb: {self.prefix_cache_gb} is more than the {have_gb:.1f} GB of memory here; "
                "lower it, or set 0 for no prefix cache"
            )
