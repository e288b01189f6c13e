"""Rotary position embedding, with the frequency scalings that Llama, Mistral and Qwen configs use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.core.errors import ModelError

_KNOWN = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
        "original_max_position_embeddings",
    },
    "longrope": {"factor", "long_factor", "short_factor", "attention_factor", "original_max_position_embeddings"},
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """kind: `default` or a scaling; theta: the base; params: constants of the scaling.

    limit: longest sequence for which the frequencies are those of `inv_freq`. `dynamic` and `longrope` change them for
    every token once a sequence grows beyond it, so that what was sampled and what is scored would differ.
    """

    kind: str
    theta: float
    head_dim: int
    max_positions: int
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        if self.kind == "dynamic":
            return self.max_positions
        if self.kind == "longrope":
            return min(self.max_positions, int(self.params["original_max_position_embeddings"]))
        return None

    @classmethod
    def from_hf(cls, hf: Any) -> RopeConfig:
        """Read `rope_parameters` of a transformers config; ModelError on a key or kind that is not known here."""
        given = dict(hf.rope_parameters or {})
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        theta = given.pop("rope_theta", None) or getattr(hf, "rope_theta", None) or 10000.0
        partial = given.pop("partial_rotary_factor", 1.0)
        params = {k: v for k, v in given.items() if v is not None}
        if kind not in _KNOWN:
            raise _refuse(f"rope_type={kind!r}; known: {', '.join(_KNOWN)}")
        if partial not in (None, 1.0):
            raise _refuse(f"partial_rotary_factor={partial}")
        strange = sorted(set(params) - _KNOWN[kind] - {"original_max_position_embeddings", "factor"})
        if strange:
            raise _refuse(f"{kind} has unknown constants {strange}")
        if kind in ("yarn", "llama3", "longrope"):
            params.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return cls(kind, float(theta), int(head_dim), int(hf.max_position_embeddings), params)

    def inv_freq(self) -> tuple[Tensor, float]:
        """([head_dim/2] fp32 frequencies, factor on cos and sin)."""
        base = 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
        if self.kind == "linear":
            return base / self.params["factor"], 1.0
        if self.kind == "llama3":
            return self._llama3(base), 1.0
        if self.kind == "yarn":
            return self._yarn(base)
        if self.kind == "longrope":
            return self._longrope(base)
        return base, 1.0

    def _llama3(self, base: Tensor) -> Tensor:
        """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a linear blend between."""
        factor, low, high = (self.params[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
        turns = self.params["original_max_position_embeddings"] * base / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return base * keep + base / factor * (1 - keep)

    def _yarn(self, base: Tensor) -> tuple[Tensor, float]:
        """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2): by parts, after turns within the original length."""
        p, dim = self.params, self.head_dim
        original = p["original_max_position_embeddings"]
        factor = p.get("factor") or self.max_positions / original

        def dim_of(turns: float) -> float:
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dim_of(p.get("beta_fast") or 32), dim_of(p.get("beta_slow") or 1)
        if p.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
        return base / factor * ramp + base * (1 - ramp), self._yarn_factor(factor)

    def _yarn_factor(self, factor: float) -> float:
        def mscale(m: float) -> float:
            return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

        p = self.params
        if p.get("attention_factor") is not None:
            return float(p["attention_factor"])
        if p.get("mscale") and p.get("mscale_all_dim"):
            return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
        return mscale(1.0)

    def _longrope(self, base: Tensor) -> tuple[Tensor, float]:
        """LongRoPE (Ding et al. 2024, arXiv:2402.13753) within the original length: the short factors."""
        p = self.params
        original = p["original_max_position_embeddings"]
        factor = p.get("factor") or self.max_positions / original
        attention = p.get("attention_factor")
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return base / torch.tensor(p["short_factor"], dtype=torch.float32), float(attention)


class Rotary:
    """Turns positions into cos and sin tables; holds nothing that is trained or saved."""

    def __init__(self, config: RopeConfig):
        self.config = config
        self._inv_freq, self._scale = config.inv_freq()

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [P, 1, head_dim/2] in `dtype`, of absolute positions [P]."""
        if self._inv_freq.device != position_ids.device:
            self._inv_freq = self._inv_freq.to(position_ids.device)
        angle = position_ids[:, None].float() * self._inv_freq
        return (angle.cos() * self._scale).to(dtype).unsqueeze(1), (angle.sin() * self._scale).to(dtype).unsqueeze(1)


def _refuse(why: str) -> ModelError:
    return ModelError(
        f"model.implementation=native does not know this rotary embedding: {why}; set model.implementation=transformers"
    )
