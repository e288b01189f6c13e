"""Cached decoding on a CPU in bf16: fewer passes over memory than the decoder that trains, on the same weights.

What follows a product (the activation, the gate, the residual) is part of the product (oneDNN). Norms, and rotary
embedding, cache write and attention in one, are compiled kernels where the machine has a compiler (`kernels.py`). And
for a burst of steps the weights are laid out for products of a few rows, where a plain product brings them into the
order that it wants each time anew; this copy (60 ms for 135M parameters) exists only while sequences decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.engines.rollout.attend import DecodeAttention
from verl.engines.rollout.kernels import Kernels
from verl.models.attention import Attend
from verl.models.decoder import Layer
from verl.models.policy import Policy

_ROWS = 32
"""Number of rows that the layout is chosen for; any number works."""


def supported(policy: Policy) -> bool:
    """Whether this machine multiplies bf16 by oneDNN and the policy computes in it."""
    weight = policy.head
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class _Linear:
    """One product: weight, as it lies or packed, and bias."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, linear: torch.nn.Linear, pack: bool) -> _Linear:
        weight = linear.weight.detach()
        return cls(_pack(weight) if pack else weight, None if linear.bias is None else linear.bias.detach())

    @classmethod
    def joined(cls, linears: tuple[torch.nn.Linear, ...]) -> _Linear:
        """Several of one input, packed as one."""
        biases = [x.bias.detach() for x in linears if x.bias is not None]
        return cls(_pack(torch.cat([x.weight.detach() for x in linears])), torch.cat(biases) if biases else None)

    def __call__(self, x: Tensor, then: str = "none") -> Tensor:
        """x W^T + b, and the function `then` of it."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], "")

    def with_(self, x: Tensor, how: str, other: Tensor) -> Tensor:
        """(x W^T + b) `how` other: "add" or "mul"."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, how)


class _Layer:
    """The products of one layer; norms are read from the layer itself."""

    def __init__(self, layer: Layer, pack: bool, fuse: bool):
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.layer = layer
        self.qkv = (_Linear.joined(projections),) if pack else tuple(_Linear.of(p, False) for p in projections)
        self.out, self.down = _Linear.of(attention.o_proj, pack), _Linear.of(mlp.down_proj, pack)
        gate_up = (mlp.gate_proj, mlp.up_proj)
        self.gate_up = (_Linear.joined(gate_up),) if pack and fuse else tuple(_Linear.of(p, pack) for p in gate_up)


class CPUDecoder:
    """What `policy.decoder(...)` and `policy.logits(...)` give, without a gradient.

    pack: with a copy of the weights as they are now; else on the policy's own, whatever they become.
    """

    @torch.no_grad()
    def __init__(self, policy: Policy, kernels: Kernels | None, pack: bool):
        config = policy.decoder.config
        self.policy, self.heads, self.kv_heads = policy, config.num_heads, config.num_kv_heads
        self.dim = config.head_dim
        self.kernels = kernels if kernels and kernels.knows(self.dim, self.heads // self.kv_heads) else None
        self.layers = [_Layer(layer, pack, fuse=self.kernels is not None) for layer in policy.decoder.layers]  # type: ignore[arg-type]
        self.head = None if policy.fp32_head or not pack else _Linear(_pack(policy.head.detach()), None)

    def __call__(self, token_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids [P], position_ids [P] -> hidden states [P, D] after the final norm."""
        decoder = self.policy.decoder
        x = decoder.embed_tokens(token_ids)
        cos, sin = decoder.rotary(position_ids, x.dtype)
        one = self.kernels is not None and isinstance(attend, DecodeAttention)
        mix = self._compiled(cos, sin, attend) if one else self._plain(cos, sin, attend)  # type: ignore[arg-type]
        for number, products in enumerate(self.layers):
            x = self._layer(products, x, number, mix)
        return self._norm(x, decoder.norm)

    def logits(self, features: Tensor) -> Tensor:
        """[B, D] -> [B, V]."""
        return self.policy.logits(features) if self.head is None else self.head(features)

    def _layer(self, products: _Layer, x: Tensor, number: int, mix: Callable[[int, Tensor], Tensor]) -> Tensor:
        attention, layer = products.layer.self_attn, products.layer
        y = self._norm(x, layer.input_layernorm)
        parts = [p(y) for p in products.qkv]
        rows = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).unflatten(-1, (-1, self.dim))
        if attention.qk_norm:
            q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], 1)
            rows = torch.cat([self._norm(q, attention.q_norm), self._norm(k, attention.k_norm), v], 1)
        x = products.out.with_(mix(number, rows), "add", x)
        y = self._norm(x, layer.post_attention_layernorm)
        return products.down.with_(self._gated(products.gate_up, y), "add", x)

    def _gated(self, products: tuple[_Linear, ...], y: Tensor) -> Tensor:
        if len(products) == 1:
            assert self.kernels is not None
            return self.kernels.silu_mul(products[0](y))
        gate, up = products
        return up.with_(y, "mul", gate(y, "swish"))

    def _compiled(self, cos: Tensor, sin: Tensor, attend: DecodeAttention) -> Callable[[int, Tensor], Tensor]:
        kernels, cos, sin = self.kernels, cos.flatten(1).contiguous(), sin.flatten(1).contiguous()
        assert kernels is not None

        def mix(layer: int, rows: Tensor) -> Tensor:
            keys, values, window = attend.cache_of(layer)
            return kernels.attend(rows, cos, sin, keys, values, attend.positions, window or 0)

        return mix

    def _plain(self, cos: Tensor, sin: Tensor, attend: Attend) -> Callable[[int, Tensor], Tensor]:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        both = self.heads + self.kv_heads

        def mix(layer: int, rows: Tensor) -> Tensor:
            qk, v = rows[:, :both], rows[:, both:]
            a, b = qk.chunk(2, -1)
            qk = torch.addcmul(qk * cos, torch.cat([b, a], -1), sin)
            return attend(layer, qk[:, : self.heads], qk[:, self.heads :], v).flatten(-2)

        return mix

    def _norm(self, x: Tensor, norm: torch.nn.Module) -> Tensor:
        weight, eps = norm.weight, norm.eps
        if self.kernels is None or x.ndim != 2:
            return F.rms_norm(x, weight.shape, weight, eps)  # type: ignore[arg-type]
        return self.kernels.rms_norm(x, weight, eps)  # type: ignore[arg-type]


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
