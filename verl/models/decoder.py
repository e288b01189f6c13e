"""One decoder for Llama, Mistral, Qwen2 and Qwen3; one body for training, prefill and cached decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verl.models.attention import Attend
from verl.models.config import DecoderConfig
from verl.models.cuts import Cuts, Share, Stage
from verl.models.kernels import Kernels
from verl.models.ops import rms_norm, rotate, silu_mul
from verl.models.rope import Rotary
from verl.models.vocabulary import CutEmbedding, Vocabulary
from verl.parallel.axes import PipelineParallel, TensorParallel
from verl.parallel.collectives import copy_to, reduce_from, share_rows


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis, in fp32 inside (Zhang & Sennrich 2019, arXiv:1910.07467).

    tp: the ranks that norm other heads by the same weight; its gradient is summed over them.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
        tp: TensorParallel | None = None,
    ):
        super().__init__()
        self.eps, self.tp = eps, tp
        self.kernels: Kernels | None = None
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.tp is None else copy_to(self.weight, self.tp)
        return rms_norm(x, weight, self.eps, self.kernels)


@dataclass(frozen=True)
class Split:
    """How the layers are cut over the ranks of `tp`. Modules get the sizes of their own part beside it."""

    tp: TensorParallel
    cuts: Cuts

    def project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The product of a column-parallel `linear` whose rows are key heads: other ranks may hold some of them too."""
        if not self.cuts.shares_keys:
            return linear(x)
        heads, dim = self.cuts.heads[self.tp.rank], self.cuts.config.head_dim
        at = (heads.keys.start * dim, self.cuts.config.num_kv_heads * dim, self.tp)
        return F.linear(
            x, share_rows(linear.weight, *at), None if linear.bias is None else share_rows(linear.bias, *at)
        )

    def read(self, x_PKd: Tensor) -> Tensor:
        """The key heads as attention reads them: equally many query heads each."""
        reads = self.cuts.heads[self.tp.rank].reads
        return x_PKd if reads is None else x_PKd[:, torch.tensor(reads, device=x_PKd.device)]

    def join(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The product of a row-parallel `linear`: the sum over ranks, and then its bias, once."""
        out = reduce_from(F.linear(x, linear.weight), self.tp)
        return out if linear.bias is None else out + linear.bias


class Attention(nn.Module):
    """Projections, query and key norms where the family has them, and rotary; the mixing itself is the caller's."""

    def __init__(
        self, c: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device | str, split: Split | None = None
    ):
        super().__init__()
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.layer, self.head_dim, self.split = layer, c.head_dim, split
        self.q_proj = nn.Linear(c.hidden_size, q, bias=c.qkv_bias, dtype=dtype, device=device)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=c.qkv_bias, dtype=dtype, device=device)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=c.qkv_bias, dtype=dtype, device=device)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=c.o_bias, dtype=dtype, device=device)
        if c.qk_norm:
            tp = split.tp if split is not None else None
            self.q_norm = RMSNorm(c.head_dim, c.rms_eps, dtype, device, tp)
            self.k_norm = RMSNorm(c.head_dim, c.rms_eps, dtype, device, tp)
        self.qk_norm = c.qk_norm
        self.kernels: Kernels | None = None

    def forward(self, x_PD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        split = self.split
        if split is None:
            q, k, v = self.q_proj(x_PD), self.k_proj(x_PD), self.v_proj(x_PD)
        else:
            x_PD = copy_to(x_PD, split.tp)
            q, k, v = self.q_proj(x_PD), split.project(self.k_proj, x_PD), split.project(self.v_proj, x_PD)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin, self.kernels), rotate(k, cos, sin, self.kernels)
        if split is None:
            return self.o_proj(attend(self.layer, q, k, v).flatten(-2))
        return split.join(self.o_proj, attend(self.layer, q, split.read(k), split.read(v)).flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, c: DecoderConfig, dtype: torch.dtype, device: torch.device | str, split: Split | None = None):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, device=device)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=dtype, device=device)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, dtype=dtype, device=device)
        self.split = split
        self.kernels: Kernels | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.split is None:
            return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x), self.kernels))
        x = copy_to(x, self.split.tp)
        return self.split.join(self.down_proj, silu_mul(self.gate_proj(x), self.up_proj(x), self.kernels))


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(
        self, c: DecoderConfig, layer: int, dtype: torch.dtype, device: torch.device | str, split: Split | None = None
    ):
        """c: with the sizes of what this rank holds."""
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_eps, dtype, device)
        self.self_attn = Attention(c, layer, dtype, device, split)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_eps, dtype, device)
        self.mlp = MLP(c, dtype, device, split)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm. Parameters are named as under `model.` in a Hugging Face checkpoint.

    tp, pp: axes over which it is cut (None: it is not). This process then holds its share, see `cuts.py`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
        tp: TensorParallel | None = None,
        pp: PipelineParallel | None = None,
    ):
        super().__init__()
        self.config, self.tp, self.pp = config, tp, pp
        self.stage = Stage(0, 1, config.num_layers) if pp is None else Stage(pp.rank, pp.size, config.num_layers)
        cuts = None if tp is None else Cuts(config, tp.size)
        self.share = Share(self.stage, cuts, 0 if tp is None else tp.rank, config.tied)
        split = None if tp is None or cuts is None else Split(tp, cuts)
        local = config if split is None else split.cuts.local(split.tp.rank)
        self.vocabulary = None if split is None else Vocabulary.of(split.cuts, split.tp)
        """This rank's part of embedding and head, None where it has all."""
        if self.stage.embeds(config.tied):
            self.embed_tokens = (
                nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
                if self.vocabulary is None
                else CutEmbedding(self.vocabulary, config.hidden_size, dtype, device)
            )
        self.layers = nn.ModuleList()
        for i in self.stage.layers:  # named by their number in the whole model
            self.layers.add_module(str(i), Layer(local, i, dtype, device, split))
        if self.stage.last:
            self.norm = RMSNorm(config.hidden_size, config.rms_eps, dtype, device)
        self.rotary = Rotary(config.rope)
        self.recompute = False
        """Whether a layer's activations are computed once more in backward, rather than kept."""
        self.kernels: Kernels | None = None
        self.without_kernels = ""
        """Why there are none, where that is worth a word."""

    @property
    def cached_heads(self) -> int:
        """Key heads that the cache of any rank must have room for."""
        return self.config.num_kv_heads if self.share.cuts is None else self.share.cuts.cached_heads

    def use(self, kernels: Kernels | None, without: str = "") -> None:
        """Compute with these between the products (a CPU in bf16), or with torch's; without: why there are none."""
        self.without_kernels = without
        for module in self.modules():
            if isinstance(module, RMSNorm | Attention | MLP | Decoder):
                module.kernels = kernels

    def forward(self, token_ids: Tensor, position_ids: Tensor, attend: Attend, hidden: Tensor | None = None) -> Tensor:
        """token_ids [P], position_ids [P] -> hidden states [P, D] after the final norm, or of a stage that is not the
        last one, after its layers. hidden: what the stage before gave; None in the first one.
        """
        x = self.embed_tokens(token_ids) if hidden is None else hidden
        cos, sin = self.rotary(position_ids, x.dtype)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():  # no dropout, so no random state to keep
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.norm(x) if self.stage.last else x
