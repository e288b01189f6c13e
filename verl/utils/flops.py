"""How much arithmetic a model needs, and how much of this device's measured peak it reached (MFU)."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BUDGET_S = 0.3
_LARGEST = 8192


def model_flops(
    num_params: int, tokens: float, *, backward: bool, attention_width: int = 0, mean_context: float = 0.0
) -> float:
    """Floating-point operations of one pass over `tokens` tokens.

    num_params: weights that take part in a product (count a tied embedding once, as the head).
    backward: add the backward pass (twice the forward's).
    attention_width: layers * heads * head_dim; mean_context: tokens that a token attends to, on average.
    Kaplan et al. 2020 (arXiv:2001.08361), section 2.1: 2N a token, plus 4 * width * context for scores and values.
    """
    forward = tokens * (2.0 * num_params + 4.0 * attention_width * mean_context)
    return forward * (3.0 if backward else 1.0)


def matmul_peak(device: str, dtype: str) -> float:
    """Measured FLOP/s of a large square product; device `cpu` or `cuda`, dtype `bfloat16` or `float32`.

    Takes under half a second, once a process for each (device, dtype).
    """
    return _measure(device, dtype)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Share of the peak that `flops` operations in `seconds` reached; 0 for no time."""
    return flops / (seconds * peak) if seconds > 0 and peak > 0 else 0.0


@lru_cache(maxsize=8)
def _measure(device: str, dtype: str) -> float:
    """Grow the product until one takes 20 ms, then keep the best of what fits into the budget."""
    import torch

    start, size, best = time.perf_counter(), 512, 0.0
    a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    _seconds(a)
    while True:
        seconds = _seconds(a)
        best = max(best, 2.0 * size**3 / seconds)
        left = _BUDGET_S - (time.perf_counter() - start)
        if left < seconds:
            return best
        if seconds < 0.02 and size < _LARGEST and left > 16 * seconds:
            size *= 2
            a = torch.randn(size, size, device=device).to(a.dtype)
            _seconds(a)


def _seconds(a: torch.Tensor) -> float:
    import torch

    if a.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    a @ a
    if a.is_cuda:
        torch.cuda.synchronize()
    return max(time.perf_counter() - start, 1e-9)
