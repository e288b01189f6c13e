"""pass@k, without replacement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray)


@overload
def pass_at_k(n: int, c: int, k: int) -> float: ...
@overload
def pass_at_k(n: Array, c: Array | Sequence[int] | int, k: int) -> Array: ...
@overload
def pass_at_k(n: Sequence[int] | int, c: Array, k: int) -> Array: ...
@overload
def pass_at_k(n: Sequence[int], c: Sequence[int] | int, k: int) -> np.ndarray: ...
@overload
def pass_at_k(n: int, c: Sequence[int], k: int) -> np.ndarray: ...
def pass_at_k(n: Any, c: Any, k: Any) -> Any:
    """Chance that k samples, drawn without replacement from n of which c are correct, hold a correct one.

    1 - C(n - c, k) / C(n, k), as a product of k factors that never overflows (arXiv:2107.03374, eq. 1). n, c: integers,
    or lists, numpy arrays or tensors of integers that broadcast; k: one integer. The answer is a float where n and c
    are, else float64: a tensor where one of them is, a numpy array otherwise.
    ValueError where not 1 <= k <= n and 0 <= c <= n.
    """
    total, correct, draws = _integers("n", n), _integers("c", c), _integers("k", k)
    if draws.ndim:
        raise ValueError(f"pass_at_k: k must be one integer, got an array of shape {draws.shape}")
    if draws < 1:
        raise ValueError(f"pass_at_k: k must be at least 1, got {draws}")
    try:
        shape = np.broadcast_shapes(total.shape, correct.shape)
    except ValueError:
        raise ValueError(f"pass_at_k: n and c must broadcast, got shapes {total.shape} and {correct.shape}") from None
    if (total < draws).any():
        raise ValueError(f"pass_at_k: needs at least k={draws} samples of each prompt, got n={total.min()}")
    if (correct < 0).any() or (correct > total).any():
        raise ValueError("pass_at_k: c counts correct samples, so it must be between 0 and n")
    missed = np.ones(shape)
    for j in range(int(draws)):  # where k > n - c, one factor is exactly 0
        missed = missed * (total - correct - j) / (total - j)
    out = np.asarray(1.0 - missed)
    tensor = next((x for x in (n, c) if isinstance(x, Tensor)), None)
    if tensor is not None:
        return torch.from_numpy(out).to(tensor.device)
    return out if out.ndim or isinstance(n, np.ndarray) or isinstance(c, np.ndarray) else float(out)


def _integers(name: str, x: Any) -> np.ndarray:
    """As int64, so that no difference of narrow or unsigned counts wraps around."""
    if isinstance(x, Tensor):
        whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if whole:
            return x.detach().cpu().numpy().astype(np.int64)
        raise ValueError(f"pass_at_k: {name} must be an integer or integers, got a tensor of {x.dtype}")
    try:
        out = np.asarray(x)
    except (ValueError, TypeError):
        raise ValueError(f"pass_at_k: {name} must be an integer or integers, got rows of unequal length") from None
    if not np.issubdtype(out.dtype, np.integer):
        got = "values that are not" if out.ndim else repr(x)
        raise ValueError(f"pass_at_k: {name} must be an integer or integers, got {got}")
    return out.astype(np.int64)
