"""The native policy: decoder and language-model head, with parameters named as in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

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
from verl.models.vocabulary import Vocabulary
from verl.parallel.axes import PipelineParallel, TensorParallel
from verl.parallel.collectives import copy_to


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
        tp: TensorParallel | None = None,
        pp: PipelineParallel | None = None,
    ):
        """fp32_head: logits are the fp32 product of the weights and states, whatever their dtype. tp, pp: as in
        `Decoder`.
        """
        super().__init__()
        self.source = source
        self.fp32_head = fp32_head
        self.model = Decoder(config, dtype, device, tp, pp)
        if not config.tied and self.model.stage.last:
            part = self.model.share.part("lm_head.weight")
            rows = config.vocab_size if part is None else part.stop - part.start
            self.lm_head = nn.Linear(config.hidden_size, rows, bias=False, dtype=dtype, device=device)

    @property
    def decoder(self) -> Decoder:
        return self.model

    @property
    def head(self) -> Tensor:
        """The output matrix [V, D], or this rank's part of it."""
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

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Whose logits `logits` gives: None for all."""
        return self.model.vocabulary

    def recompute_layers(self) -> None:
        """From now on, keep only the inputs of layers for backward."""
        self.model.recompute = True

    def features(self, packed: PackedInput, hidden: Tensor | None = None) -> Tensor:
        """Hidden states [P, D] after the final norm; of a stage that is not the last, after its layers.

        hidden: what the stage before gave.
        """
        return hidden_states(self.model, packed, hidden)

    def logits(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., V]; of this rank's part of the vocabulary where it is cut."""
        if self.fp32_head:
            features = features.float()
        if self.vocabulary is not None:
            features = copy_to(features, self.vocabulary.tp)
        return F.linear(features, self.head.float() if self.fp32_head else self.head)

    def all_logits(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., V], gathered where the vocabulary is cut. No gradient."""
        logits = self.logits(features)
        return logits if self.vocabulary is None else self.vocabulary.gather(logits)


@dataclass(frozen=True)
class AfterStage:
    """A policy whose first layers another process has computed."""

    policy: Policy
    hidden: Tensor

    @property
    def kernels(self) -> Kernels | None:
        return self.policy.kernels

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self.policy.vocabulary

    def features(self, packed: PackedInput) -> Tensor:
        """[P, D] after the final norm."""
        return self.policy.features(packed, self.hidden)

    def logits(self, features: Tensor) -> Tensor:
        return self.policy.logits(features)


AnyPolicy = Policy | TransformersPolicy


def after(policy: AnyPolicy, hidden: Tensor | None) -> AnyPolicy | AfterStage:
    """The last stage of a pipeline as something that scores tokens. hidden: what the stage before gave; None: there is
    none, and the policy is that itself.
    """
    if hidden is None:
        return policy
    assert isinstance(policy, Policy)
    return AfterStage(policy, hidden)


def hidden_states(decoder: Decoder, packed: PackedInput, hidden: Tensor | None = None) -> Tensor:
    """[P, D] of a packed input; hidden: as in `Decoder.forward`. ModelError where a sequence is longer than the rotary
    embedding stays constant.
    """
    limit = decoder.config.rope.limit
    if limit is not None and packed.longest > limit:
        raise ModelError(
            f"a sequence of {packed.longest} tokens is beyond the {limit} up to which {decoder.config.rope.kind} "
            "rotary scaling is constant; lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
    attend = PackedAttention(packed.plan, decoder.config.window, decoder.kernels)
    return decoder(packed.token_ids, packed.position_ids, attend, hidden)
