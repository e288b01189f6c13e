"""Any `AutoModelForCausalLM` as a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verl.core.errors import ModelError
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
    described = "transformers implementation"
    shares_prompt = False
    kernels: Kernels | None = None
    entry = "features"
    agree: Callable[[int], int] = int
    """From the forwards that an input takes here to those that all ranks make, where they gather weights together."""
    vocabulary: Vocabulary | None = None

    def __init__(self, module: Any, source: ModelSource):
        super().__init__()
        self.module = module
        self.source = source
        self.train(False)

    def train(self, mode: bool = True) -> TransformersPolicy:
        """Stays in eval mode whatever `mode` says."""
        return super().train(False)

    def layers(self) -> list[nn.Module]:
        return decoder_layers(self.module)

    def recompute_layers(self) -> None:
        """From now on, keep only the inputs of layers for backward. ConfigError where its code does not mark them."""
        recompute_layers(self.module)

    def features(self, packed: PackedInput) -> Tensor:
        """Logits [P, V] at the packed positions."""
        return run_padded(lambda **inputs: self.module(**inputs).logits, packed, self.agree)

    def logits(self, features: Tensor) -> Tensor:
        """The features themselves."""
        return features


def decoder_layers(module: Any) -> list[nn.Module]:
    """The modules that transformers never splits between devices. ModelError where a model names none."""
    names = set(module._no_split_modules or ())
    layers = [m for m in module.modules() if type(m).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(module).__name__} does not say which of its modules are layers, so it cannot be sharded; "
            "set fsdp to 1"
        )
    return layers


def run_padded(forward: Callable[..., Tensor], packed: PackedInput, agree: Callable[[int], int] = int) -> Tensor:
    """Run a transformers forward on padded sequences of similar length; [P, F] at the packed positions.

    Padding is on the right, so the positions that every model gives itself are the true ones. Where ranks make more
    forwards than this input takes (`agree`), the rest run on one token whose outputs nobody reads.
    """
    assert not any(block.branches for block in packed.blocks), "a transformers model cannot share prompts"
    inputs = [(packed.token_ids[b.query], (b.key_branch >= 0).to(torch.int64)) for b in packed.plan.buckets]
    alone = packed.token_ids[:1].unsqueeze(0)
    inputs += [(alone, torch.ones_like(alone))] * (agree(len(inputs)) - len(inputs))
    outs = [forward(input_ids=ids, attention_mask=real, use_cache=False).flatten(0, 1) for ids, real in inputs]
    return torch.cat(outs).index_select(0, packed.plan.place)
