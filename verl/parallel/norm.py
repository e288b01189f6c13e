"""The norm of a gradient that several ranks hold together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.parallel.mesh import DIMS, Mesh


@torch.no_grad()
def global_norm(grads: Sequence[Tensor], owned: Sequence[Tensor], mesh: Mesh) -> float:
    """2-norm of the model's gradient, the same on every rank; nan or inf if any element anywhere is.

    grads: this rank's parts, summed over the data axis already. owned: views of those elements that count here, such
    that over stages, tensor ranks and FSDP neighbours each counts once.
    """
    all_of, mine = _squares(grads), _squares(owned)
    # What others count must be finite here too, or ranks would not act alike: 0 times anything else is nan.
    # Copies hold the same numbers, and their mean is it too: but where one is damaged, all see it.
    copies = mesh.layout.dp // mesh.layout.fsdp
    return float((mesh.sum(mine + 0.0 * all_of, *DIMS) / copies).sqrt())


def _squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum of squares in fp64 (a scalar on the gradients' device); norms are fp32 sums, as torch makes them."""
    some = [g for g in grads if g.numel()]
    if not some:
        return torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    return torch.stack(torch._foreach_norm(some)).double().square().sum()
