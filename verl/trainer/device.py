"""Which device the models of a run are on."""

from __future__ import annotations

import torch

from verl.config.run import RunConfig
from verl.core.errors import ConfigError


def pick_device(cfg: RunConfig) -> str:
    wanted = cfg.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device: no usable CUDA device; use --device cpu, or install a torch build for your driver"
        )
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
