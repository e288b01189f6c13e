"""Presets: one name for a whole `algorithm` section, with the constants of its source. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """values: a partial configuration tree, laid under what the user sets."""

    name: str
    doc: str
    source: str
    values: dict[str, Any]


def _preset(name: str, doc: str, source: str, **algorithm: Any) -> Preset:
    return Preset(name, doc, source, {"algorithm": {"name": name, **algorithm}})


PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        _preset(
            "ppo",
            "Clipped policy gradient with a critic (GAE) and the KL to the reference inside the reward.",
            "Schulman et al. 2017 (arXiv:1707.06347, eq. 7); GAE: arXiv:1506.02438, eq. 16; KL in the reward: "
            "Ouyang et al. 2022 (arXiv:2203.02155, eq. 2)",
            advantage={"name": "gae", "gamma": 1.0, "lam": 0.95},
            policy_loss={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
            aggregation="token_mean",
            kl={"place": "reward", "coef": 0.1, "estimator": "k1"},
        ),
        _preset(
            "grpo",
            "No critic: a sample's advantage is its reward against the other samples of its prompt; KL in the loss.",
            "Shao et al. 2024, DeepSeekMath (arXiv:2402.03300, eq. 3, 4 and section 4.2)",
            advantage={"name": "grpo", "normalize_by_std": True},
            policy_loss={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
            aggregation="seq_mean_token_mean",
            kl={"place": "loss", "coef": 0.04, "estimator": "k3"},
        ),
    )
}


def preset_values() -> dict[str, dict[str, Any]]:
    """What the config loader lays beneath the user's file."""
    return {name: preset.values for name, preset in PRESETS.items()}
