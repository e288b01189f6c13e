"""pass@k, without replacement."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray)


@overload
def pass_at_k(n: int, c: int, k: int) -> float: ...
@overload
def pass_at_k(n: Array, c: Array | int, k: int) -> Array: ...
@overload
def pass_at_k(n: int, c: Array, k: int) -> Array: ...
def pass_at_k(n: Any, c: Any, k: int) -> Any:
    """Chance that k samples, drawn without replacement from n of which c are correct, hold a correct one.

    1 - C(n - c, k) / C(n, k), as a product of k factors that never overflows (arXiv:2107.03374, eq. 1). n, c: integers,
    or numpy arrays or tensors of integers that broadcast; the answer is a float, or a float64 array or tensor.
    ValueError where not 1 <= k <= n and 0 <= c <= n.
    """
    total, correct = _integers("n", n), _integers("c", c)
    if _integers("k", k).ndim:
        raise ValueError(f"pass_at_k: k must be one integer, got an array of shape {np.shape(k)}")
    if k < 1:
        raise ValueError(f"pass_at_k: k must be at least 1, got {k}")
    if (total < k).any():
        raise ValueError(f"pass_at_k: needs at least k={k} samples of each prompt, got n={total.min()}")
    if (correct < 0).any() or (correct > total).any():
        raise ValueError("pass_at_k: c counts correct samples, so it must be between 0 and n")
    missed = np.ones(np.broadcast_shapes(total.shape, correct.shape))
    for j in range(k):  # where k > n - c, one factor is exactly 0
        missed = missed * (total - correct - j) / (total - j)
    out = 1.0 - missed
    tensor = next((x for x in (n, c) if isinstance(x, Tensor)), None)
    if tensor is not None:
        return torch.from_numpy(np.asarray(out)).to(tensor.device)
    return out if isinstance(n, np.ndarray) or isinstance(c, np.ndarray) else float(out)


def _integers(name: str, x: Any) -> np.ndarray:
    out = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if not np.issubdtype(out.dtype, np.integer):
        raise ValueError(f"pass_at_k: {name} must be an integer or an array of integers, got {x!r}")
    return out
