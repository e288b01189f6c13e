"""The machines that a plan is for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from verl.core.errors import ConfigError

USABLE = 0.9
"""Share of a GPU's memory that a plan fills: the rest is for the CUDA context, libraries and freed memory in pieces."""


@dataclass(frozen=True)
class Hardware:
    """gpus: how many there are. Rates are of one GPU, in both directions together where it sends and receives.

    memory_gb: 10^9 bytes; tflops: 10^12 floating-point operations a second in the model's dtype; hbm_gbps, link_gbps
    (within a node), network_gbps (between nodes), host_gbps (to the host's memory): 10^9 bytes a second.
    """

    gpus: int
    gpus_per_node: int = 8
    gpu_memory_gb: float = 80.0
    tflops: float = 989.0
    hbm_gbps: float = 3350.0
    link_gbps: float = 900.0
    network_gbps: float = 50.0
    host_gbps: float = 55.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{f.name}: {value:g} must be above 0")

    @property
    def usable(self) -> float:
        """Bytes of a GPU that a plan may fill."""
        return USABLE * self.gpu_memory_gb * 1e9

    @property
    def flops(self) -> float:
        return self.tflops * 1e12

    @property
    def hbm(self) -> float:
        return self.hbm_gbps * 1e9

    @property
    def host(self) -> float:
        return self.host_gbps * 1e9

    def bandwidth(self, span: int, nproc: int) -> float:
        """Bytes a second within groups that each lie in `span` neighbouring ranks, in a pool of `nproc` ranks.

        A pool no larger than a node is in one node; in larger ones a group leaves its node where `span` does not
        divide the node.
        """
        inside = nproc <= self.gpus_per_node or self.gpus_per_node % span == 0
        return (self.link_gbps if inside else min(self.link_gbps, self.network_gbps)) * 1e9
