"""Any `AutoModelForCausalLM` as a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.kernels import Kernels
from verl.models.packed import PackedInput
from verl.models.recompute import recompute_layers
from verl.models.source import ModelSource
from verl.models.vocabulary import Vocabulary


class TransformersPolicy(nn.Module):
    """A transformers module. Its features are its logits, so that whatever it does to them (soft caps ...) is kept.

    It stays in eval mode, so that no dropout makes two passes differ; gradients flow all the same.
    """

    implementation = "transformers"
    shares_prompt = False
    kernels: Kernels | None = None
    vocabulary: Vocabulary | None = None

    def __init__(self, module: Any, source: ModelSource):
        super().__init__()
        self.module = module
        self.source = source
        self.train(False)

    def train(self, mode: bool = True) -> TransformersPolicy:
        """Stays in eval mode whatever `mode` says."""
        return super().train(False)

    def recompute_layers(self) -> None:
        """From now on, keep only the inputs of layers for backward. ConfigError where its code does not mark them."""
        recompute_layers(self.module)

    def features(self, packed: PackedInput) -> Tensor:
        """Logits [P, V] at the packed positions."""
        return run_padded(lambda **inputs: self.module(**inputs).logits, packed)

    def logits(self, features: Tensor) -> Tensor:
        """The features themselves."""
        return features


def run_padded(forward: Callable[..., Tensor], packed: PackedInput) -> Tensor:
    """Run a transformers forward on padded sequences of similar length; [P, F] at the packed positions.

    Padding is on the right, so the positions that every model gives itself are the true ones.
    """
    assert not any(block.branches for block in packed.blocks), "a transformers model cannot share prompts"
    outs = []
    for bucket in packed.plan.buckets:
        real = (bucket.key_branch >= 0).to(torch.int64)
        out = forward(input_ids=packed.token_ids[bucket.query], attention_mask=real, use_cache=False)
        outs.append(out.flatten(0, 1))
    return torch.cat(outs).index_select(0, packed.plan.place)
