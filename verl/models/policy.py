"""The native policy: decoder and language-model head, with parameters named as in the checkpoint."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.core.errors import ModelError
from verl.models.attention import PackedAttention, takes_heads
from verl.models.config import DecoderConfig
from verl.models.decoder import Decoder
from verl.models.hf import TransformersPolicy
from verl.models.kernels import Kernels
from verl.models.packed import PackedInput
from verl.models.source import ModelSource


class Policy(nn.Module):
    """`model.*` is the decoder, `lm_head.weight` the output matrix; a tied head is the embedding itself."""

    implementation = "native"
    shares_prompt = True
    entry = "features"

    def __init__(
        self,
        config: DecoderConfig,
        source: ModelSource,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
        fp32_head: bool = False,
    ):
        """fp32_head: logits are the fp32 product of the weights and states, whatever their dtype."""
        super().__init__()
        self.source = source
        self.fp32_head = fp32_head
        self.model = Decoder(config, dtype, device)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)

    @property
    def decoder(self) -> Decoder:
        return self.model

    @property
    def head(self) -> Tensor:
        """The output matrix [V, D]."""
        return self.model.embed_tokens.weight if self.model.config.tied else self.lm_head.weight

    @property
    def kernels(self) -> Kernels | None:
        return self.model.kernels

    @property
    def described(self) -> str:
        """Which code computes."""
        if self.kernels is not None:
            dim = self.model.config.head_dim
            but = "" if takes_heads(dim) else f" (but for attention: head size {dim} is no multiple of 16)"
            return "native implementation, compiled kernels" + but
        why = self.model.without_kernels
        return "native implementation" + (f", without compiled kernels ({why})" if why else "")

    def layers(self) -> list[nn.Module]:
        return list(self.model.layers)

    def recompute_layers(self) -> None:
        """From now on, keep only the inputs of layers for backward."""
        self.model.recompute = True

    def features(self, packed: PackedInput) -> Tensor:
        """Hidden states [P, D] after the final norm."""
        return hidden_states(self.model, packed)

    def logits(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        if self.fp32_head:
            return F.linear(features.float(), self.head.float())
        return F.linear(features, self.head)


AnyPolicy = Policy | TransformersPolicy


def hidden_states(decoder: Decoder, packed: PackedInput) -> Tensor:
    """[P, D] of a packed input. ModelError where a sequence is longer than the rotary embedding stays constant."""
    limit = decoder.config.rope.limit
    if limit is not None and packed.longest > limit:
        raise ModelError(
            f"a sequence of {packed.longest} tokens is beyond the {limit} up to which {decoder.config.rope.kind} "
            "rotary scaling is constant; lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
    attend = PackedAttention(packed.plan, decoder.config.window, decoder.kernels)
    return decoder(packed.token_ids, packed.position_ids, attend)
