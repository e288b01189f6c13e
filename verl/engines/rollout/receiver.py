"""The weight side of an engine that generates with weights of its own, beside those that train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from verl.core.protocols import RolloutEngine


class Receiver:
    """policy: what `engine` generates with. Each weight that comes is copied into its place."""

    def __init__(self, engine: RolloutEngine, policy: nn.Module):
        self.engine = engine
        self._weights = {name: p.detach() for name, p in policy.named_parameters()}

    def wanted(self) -> Sequence[str]:
        """All of them."""
        return list(self._weights)

    @torch.no_grad()
    def receive(self, name: str, tensor: Tensor) -> None:
        """One weight of the next version."""
        self._weights[name].copy_(tensor)

    def commit(self, version: int) -> None:
        """Generate with what has come."""
        self.engine.commit(version)
