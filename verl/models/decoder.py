"""One decoder for Llama, Mistral, Qwen2 and Qwen3; one body for training, prefill and cached decoding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verl.models.attention import Attend
from verl.models.config import DecoderConfig
from verl.models.kernels import Kernels
from verl.models.ops import rms_norm, rotate, silu_mul
from verl.models.rope import Rotary


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis, in fp32 inside (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.eps = eps
        self.kernels: Kernels | None = None
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.kernels)


class Attention(nn.Module):
    """Projections, query and key norms where the family has them, and rotary; the mixing itself is the caller's."""

    def __init__(self, c: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.layer, self.head_dim = layer, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q, bias=c.qkv_bias, dtype=dtype, device=device)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=c.qkv_bias, dtype=dtype, device=device)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=c.qkv_bias, dtype=dtype, device=device)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=c.o_bias, dtype=dtype, device=device)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_eps, dtype, device)
            self.k_norm = RMSNorm(c.head_dim, c.rms_eps, dtype, device)
        self.qk_norm = c.qk_norm
        self.kernels: Kernels | None = None

    def forward(self, x_PD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q = self.q_proj(x_PD).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x_PD).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x_PD).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, cos, sin, self.kernels), rotate(k, cos, sin, self.kernels), v)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, c: DecoderConfig, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, device=device)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, device=device)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, dtype=dtype, device=device)
        self.kernels: Kernels | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x), self.kernels))


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, c: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_eps, dtype, device)
        self.self_attn = Attention(c, layer, dtype, device)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_eps, dtype, device)
        self.mlp = MLP(c, dtype, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm. Parameters are named as under `model.` in a Hugging Face checkpoint."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "meta"):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(Layer(config, i, dtype, device) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, dtype, device)
        self.rotary = Rotary(config.rope)
        self.recompute = False
        """Whether a layer's activations are computed once more in backward, rather than kept."""
        self.kernels: Kernels | None = None
        self.without_kernels = ""
        """Why there are none, where that is worth a word."""

    def use(self, kernels: Kernels | None, without: str = "") -> None:
        """Compute with these between the products (a CPU in bf16), or with torch's; without: why there are none."""
        self.without_kernels = without
        for module in self.modules():
            if isinstance(module, RMSNorm | Attention | MLP | Decoder):
                module.kernels = kernels

    def forward(self, token_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids [P], position_ids [P] -> hidden states [P, D] after the final norm."""
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(position_ids, x.dtype)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():  # no dropout, so no random state to keep
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.norm(x)
