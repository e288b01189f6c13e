"""The weight side of an engine that generates with weights of its own, beside those that train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from verl.core.protocols import RolloutEngine


class Receiver:
    """policy: what `engine` generates with. Each weight that comes is copied into its place; from `free` to the next
    version the weights take no memory, and nothing can be generated.
    """

    def __init__(self, engine: RolloutEngine, policy: nn.Module):
        self.engine = engine
        self._weights = {name: p.detach() for name, p in policy.named_parameters()}
        self._nbytes = {name: mine.untyped_storage().nbytes() for name, mine in self._weights.items()}

    def wanted(self) -> Sequence[str]:
        """All of them."""
        return list(self._weights)

    @torch.no_grad()
    def receive(self, name: str, tensor: Tensor) -> None:
        """One weight of the next version."""
        mine = self._weights[name]
        if mine.untyped_storage().nbytes() == 0:
            mine.untyped_storage().resize_(self._nbytes[name])
        mine.copy_(tensor)

    def free(self) -> None:
        """Give the weights' memory back, while the next version is made."""
        for mine in self._weights.values():
            mine.untyped_storage().resize_(0)

    def commit(self, version: int) -> None:
        """Generate with what has come."""
        self.engine.commit(version)
