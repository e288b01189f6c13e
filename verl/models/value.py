"""The value model: a body and one linear output in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.decoder import Decoder
from verl.models.hf import decoder_layers, run_padded
from verl.models.packed import PackedInput
from verl.models.policy import hidden_states
from verl.models.recompute import recompute_layers
from verl.models.source import ModelSource


class ValueModel(nn.Module):
    """model: the native decoder, or a transformers body. score: [1, D], fp32, as reward models call their head; of a
    pipeline only the last stage has it.
    """

    entry = "values"
    agree: Callable[[int], int] = int

    def __init__(self, model: Decoder | Any, width: int, source: ModelSource, device: torch.device | str):
        super().__init__()
        self.model = model
        if not isinstance(model, Decoder) or model.stage.last:
            self.score = nn.Linear(width, 1, bias=False, dtype=torch.float32, device=device)
        self.source = source
        self.implementation = "native" if isinstance(model, Decoder) else "transformers"
        self.shares_prompt = isinstance(model, Decoder)
        self.train(False)

    def train(self, mode: bool = True) -> ValueModel:
        """Stays in eval mode whatever `mode` says, so that no dropout makes two passes differ."""
        return super().train(False)

    def layers(self) -> list[nn.Module]:
        return list(self.model.layers) if isinstance(self.model, Decoder) else decoder_layers(self.model)

    def recompute_layers(self) -> None:
        """From now on, keep only the inputs of layers for backward. ConfigError where its code does not mark them."""
        if isinstance(self.model, Decoder):
            self.model.recompute = True
        else:
            recompute_layers(self.model)

    def values(self, packed: PackedInput, before: Tensor | None = None) -> Tensor:
        """[T] fp32: the value of the state before each token; 0 where not a row. Of a stage that is not the
        last: hidden states [P, D] after its layers.

        before: the states that the stage before gave.
        """
        if isinstance(self.model, Decoder):
            hidden = hidden_states(self.model, packed, before)
            if not self.model.stage.last:
                return hidden
        else:
            hidden = run_padded(lambda **inputs: self.model(**inputs).last_hidden_state, packed, self.agree)
        rows = hidden.index_select(0, packed.pred).float()
        return packed.scatter(self.score(rows).squeeze(-1))
