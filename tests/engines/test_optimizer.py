"""Gradients of several backward passes add up in fp32, whatever the memory layout of a weight."""

import pytest
import torch
from torch import nn

from verl.config.models import OptimConfig
from verl.engines.train import optimizer


@pytest.mark.parametrize("transposed", [False, True])
def test_bf16_gradients_add_up_in_fp32_piece_by_piece(monkeypatch, transposed):
    monkeypatch.setattr(optimizer, "_PIECE", 7)  # does not divide the 12 x 5 elements
    weight = torch.zeros(5, 12, dtype=torch.bfloat16).t() if transposed else torch.zeros(12, 5, dtype=torch.bfloat16)
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    master = optimizer.MasterAdamW(module, OptimConfig(), total_steps=1)

    draw = torch.Generator().manual_seed(0)
    slopes = [torch.randn(12, 5, generator=draw).bfloat16() * scale for scale in (256.0, 1.0, 2.0**-6)]
    for slope in slopes:
        (module.weight * slope).sum().backward()

    assert master.grads[0].is_contiguous() is not transposed
    assert torch.equal(master.grads[0], sum(s.float() for s in slopes))
    assert not torch.equal(master.grads[0], sum(slopes[1:], slopes[0]).float())  # bf16 sums would have lost some
    assert module.weight.grad is None
