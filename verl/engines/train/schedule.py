"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math

from verl.config.models import OptimConfig


def lr_at(step: int, cfg: OptimConfig, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 0) out of `total_steps` planned."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    done = min(1.0, (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps))
    shape = 1.0 - done if cfg.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * shape)
