"""The norm of a gradient that several ranks hold together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.parallel.mesh import Mesh


@torch.no_grad()
def global_norm(grads: Sequence[Tensor], over_tp: Sequence[bool], mesh: Mesh) -> float:
    """2-norm of the model's gradient, the same on every rank; nan or inf if any element anywhere is.

    grads: this rank's parts, summed over the data axis already. over_tp: whether tensor ranks hold different parts of
    one; where they hold the same, it counts once.
    """
    squares = [_squares([g for g, cut in zip(grads, over_tp, strict=True) if cut == which]) for which in (False, True)]
    # Copies hold the same numbers, and their mean is it too: but where one is damaged, all see it and act alike.
    copies = mesh.layout.dp // mesh.layout.fsdp
    same, parted = (mesh.sum(torch.stack(squares), "shard", "replicate") / copies).unbind()
    return float((same + mesh.sum(parted, "tp")).sqrt())


def _squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum of squares in fp64 (a scalar on the gradients' device); norms are fp32 sums, as torch makes them."""
    some = [g for g in grads if g.numel()]
    if not some:
        return torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    return torch.stack(torch._foreach_norm(some)).double().square().sum()
