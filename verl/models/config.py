"""What the native decoder needs to know of a model, read from its Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.core.errors import ModelError
from verl.models.rope import RopeConfig

NATIVE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the families that one decoder file serves."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. windows: per layer, how many last positions a token attends to (None: all)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    max_positions: int

    def window(self, layer: int) -> int | None:
        """How many last positions, its own included, a token of `layer` attends to; None: all."""
        return self.windows[layer]

    @property
    def head_params(self) -> int:
        """Of the output matrix, tied or not."""
        return self.vocab_size * self.hidden_size

    def num_params(self, head: bool = True) -> int:
        """Number of parameters; `head` counts the output matrix where it is not tied to the embedding."""
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = d * (q + 2 * kv) + q * d + 3 * d * self.intermediate_size + 2 * d
        layer += (q + 2 * kv) * self.qkv_bias + d * self.o_bias + (2 * self.intermediate_size + d) * self.mlp_bias
        layer += 2 * self.head_dim * self.qk_norm
        output = self.vocab_size * d if head and not self.tied else 0
        return self.vocab_size * d + self.num_layers * layer + d + output

    @classmethod
    def from_hf(cls, hf: Any) -> DecoderConfig:
        """Read a transformers config. ModelError on anything that this decoder would not compute exactly."""
        family = hf.model_type
        if family not in NATIVE_TYPES:
            raise _refuse(f"architecture {family!r} is not one of {', '.join(NATIVE_TYPES)}")
        if hf.hidden_act != "silu":
            raise _refuse(f"hidden_act={hf.hidden_act!r}, only silu is known for {family}")
        if getattr(hf, "quantization_config", None) is not None:
            raise _refuse("its weights are quantized (quantization_config)")
        heads, rope = hf.num_attention_heads, RopeConfig.from_hf(hf)
        bias = bool(getattr(hf, "attention_bias", False)) and family in ("llama", "qwen3")
        return cls(
            model_type=family,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
            rms_eps=hf.rms_norm_eps,
            tied=bool(hf.tie_word_embeddings),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=bool(getattr(hf, "mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            windows=_windows(hf),
            rope=rope,
            max_positions=rope.limit or hf.max_position_embeddings,
        )


def _windows(hf: Any) -> tuple[int | None, ...]:
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None)
    if hf.model_type == "mistral" and kinds is not None:
        raise _refuse("it mixes attention kinds (layer_types), which transformers' Mistral does not read either")
    if hf.model_type == "llama" or window is None:
        return (None,) * hf.num_hidden_layers
    if kinds is None:
        return (int(window),) * hf.num_hidden_layers
    strange = set(kinds) - {"full_attention", "sliding_attention"}
    if strange:
        raise _refuse(f"layer_types holds {sorted(strange)}")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _refuse(why: str) -> ModelError:
    return ModelError(
        f"model.implementation=native cannot run this model: {why}; set model.implementation=transformers"
    )
