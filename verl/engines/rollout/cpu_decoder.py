"""Cached decoding on a CPU in bf16: fewer passes over memory than the decoder that trains, on the same weights.

What follows a product (the activation, the gate, the residual) is part of the product (`products.py`). Norms, and
rotary embedding, cache write and attention in one, are compiled kernels where the machine has a compiler
(`kernels.py`). And for a burst of steps the weights are laid out in the order in which products read them, where a
plain product brings them into it each time anew; this copy (60 ms for 135M parameters) exists only while sequences
decode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.engines.rollout.attend import DecodeAttention, PrefillAttention
from verl.engines.rollout.kernels import Kernels, Places
from verl.engines.rollout.layers import Layers
from verl.engines.rollout.products import Layout, Native
from verl.models.attention import Attend
from verl.models.decoder import Layer
from verl.models.policy import Policy


def supported(policy: Policy) -> bool:
    """Whether this machine multiplies bf16 by oneDNN and the policy computes in it."""
    weight = policy.head
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Layer:
    """The products of one layer; norms are read from the layer itself."""

    def __init__(self, layer: Layer, layout: Layout):
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = layer
        self.qkv = layout.of((attention.q_proj, attention.k_proj, attention.v_proj))
        self.out, self.down = layout.of((attention.o_proj,)), layout.of((mlp.down_proj,))
        self.gated = layout.gated(mlp.gate_proj, mlp.up_proj)


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
        layout = Layout(kernels, pack)
        self.layers = [_Layer(layer, layout) for layer in policy.decoder.layers]  # type: ignore[arg-type]
        self.fused = self._fused() if self.kernels is not None else None
        self.head = None if policy.fp32_head or not pack else layout.head(policy.head.detach())

    def __call__(self, token_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids [P], position_ids [P] -> hidden states [P, D] after the final norm."""
        decoder = self.policy.decoder
        x = decoder.embed_tokens(token_ids)
        cos, sin = decoder.rotary(position_ids, x.dtype)
        ours = attend if isinstance(attend, DecodeAttention | PrefillAttention) else None
        places = ours.places if ours is not None and self.kernels is not None else None
        if ours is not None and places is not None and self.fused is not None:
            x = self.fused(x, _flat(cos), _flat(sin), places, ours.cache_of)
            return self._norm(x, decoder.norm)
        mix = self._compiled(cos, sin, ours, places) or self._plain(cos, sin, attend)
        for number, products in enumerate(self.layers):
            x = self._layer(products, x, number, mix)
        return self._norm(x, decoder.norm)

    def logits(self, features: Tensor) -> Tensor:
        """[B, D] -> [B, V]."""
        return self.policy.logits(features) if self.head is None else self.head(features)

    def _layer(self, products: _Layer, x: Tensor, number: int, mix: Callable[[int, Tensor], Tensor]) -> Tensor:
        attention, layer = products.layer.self_attn, products.layer
        y = self._norm(x, layer.input_layernorm)
        rows = products.qkv(y).unflatten(-1, (-1, self.dim))
        if attention.qk_norm:
            q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], 1)
            rows = torch.cat([self._norm(q, attention.q_norm), self._norm(k, attention.k_norm), v], 1)
        x = products.out.onto(mix(number, rows), x)
        y = self._norm(x, layer.post_attention_layernorm)
        return products.down.onto(products.gated(y), x)

    def _fused(self) -> Layers | None:
        """All layers as one call, where every product is the compiled one."""
        fused = Layers(self.policy.decoder.config)
        for one in self.layers:
            packed = [p.packed for p in (one.qkv, one.out, one.gated, one.down) if isinstance(p, Native)]
            if len(packed) < 4:
                return None
            fused.add(one.layer, *packed)
        return fused

    def _compiled(
        self, cos: Tensor, sin: Tensor, attend: DecodeAttention | PrefillAttention | None, places: Places | None
    ) -> Callable[[int, Tensor], Tensor] | None:
        kernels, cos, sin = self.kernels, _flat(cos), _flat(sin)
        if kernels is None or attend is None or places is None:
            return None

        def mix(layer: int, rows: Tensor) -> Tensor:
            keys, values, window = attend.cache_of(layer)
            return kernels.attend(rows, cos, sin, keys, values, places, window or 0)

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


def _flat(angles: Tensor) -> Tensor:
    """[R, 1, hd / 2] as [R, hd / 2]."""
    return angles.flatten(1).contiguous()
