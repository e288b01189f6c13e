"""Presets: one name for a whole algorithm, with the constants of its source. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.loader import overlay


@dataclass(frozen=True)
class Preset:
    """values: a partial configuration tree, laid under what the user sets.

    source: where the constants come from. ours: what the source leaves open or other settings need, and we chose.
    """

    name: str
    doc: str
    source: str
    values: dict[str, Any]
    ours: str = ""


PRESETS: dict[str, Preset] = {}

CLIP = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
GROUP = {"name": "grpo", "normalize_by_std": True}
NO_KL = {"place": "loss", "coef": 0.0, "estimator": "k3"}


def _preset(name: str, doc: str, source: str, ours: str = "", more: dict[str, Any] | None = None, **algo: Any) -> None:
    """Add one. algo: the section `algorithm`; more: other sections."""
    base = {"algorithm": {"name": name, "kl": NO_KL, **algo}}
    PRESETS[name] = Preset(name, doc, source, overlay(base, more or {}), ours)


_preset(
    "ppo",
    "Clipped policy gradient with a critic (GAE) and the KL to the reference inside the reward.",
    "Schulman et al. 2017 (arXiv:1707.06347, eq. 7); GAE: arXiv:1506.02438, eq. 16; KL in the reward: "
    "Ouyang et al. 2022 (arXiv:2203.02155, eq. 2)",
    advantage={"name": "gae", "gamma": 1.0, "lam": 0.95},
    policy_loss=CLIP,
    aggregation="token_mean",
    ours="KL coefficient",
    kl={"place": "reward", "coef": 0.1, "estimator": "k1"},
)
_preset(
    "grpo",
    "No critic: a sample's advantage is its reward against the other samples of its prompt; KL in the loss.",
    "Shao et al. 2024, DeepSeekMath (arXiv:2402.03300, eq. 3, 4 and section 4.2)",
    advantage=GROUP,
    policy_loss=CLIP,
    aggregation="seq_mean_token_mean",
    kl={"place": "loss", "coef": 0.04, "estimator": "k3"},
)
_preset(
    "dr_grpo",
    "GRPO without its two biases: no division by the group's deviation, none by the response's own length.",
    "Liu et al. 2025, Understanding R1-Zero-like training (arXiv:2503.20783)",
    "the fixed length is rollout.max_response_tokens",
    advantage={"name": "grpo", "normalize_by_std": False},
    policy_loss=CLIP,
    aggregation="seq_mean_token_sum_norm",
)
_preset(
    "rloo",
    "REINFORCE with the mean of the prompt's other samples as baseline; KL in the reward.",
    "Ahmadian et al. 2024, Back to basics (arXiv:2402.14740)",
    "KL coefficient; on-policy, so the loss without a ratio",
    advantage={"name": "rloo"},
    policy_loss={"name": "reinforce"},
    aggregation="seq_mean_token_sum",
    kl={"place": "reward", "coef": 0.03, "estimator": "k1"},
)
_preset(
    "reinforce",
    "REINFORCE with the batch mean as baseline and nothing else.",
    "Williams 1992 (Machine Learning 8)",
    "whitened over the batch",
    advantage={"name": "reinforce_pp", "gamma": 1.0},
    policy_loss={"name": "reinforce"},
    aggregation="token_mean",
)
_preset(
    "reinforce_pp",
    "REINFORCE++: PPO's clipped loss on whitened returns, no critic; KL in each token's reward.",
    "Hu et al. 2025 (arXiv:2501.03262)",
    "KL coefficient",
    advantage={"name": "reinforce_pp", "gamma": 1.0},
    policy_loss=CLIP,
    aggregation="token_mean",
    kl={"place": "reward", "coef": 0.01, "estimator": "k1"},
)
_preset(
    "reinforce_pp_baseline",
    "REINFORCE++ for groups: less the prompt's mean, then whitened over the batch; KL in the loss by k2.",
    "Hu et al. 2025 (arXiv:2501.03262, REINFORCE++-baseline)",
    "KL coefficient",
    advantage={"name": "reinforce_pp_baseline"},
    policy_loss=CLIP,
    aggregation="token_mean",
    kl={"place": "loss", "coef": 0.01, "estimator": "k2"},
)
_preset(
    "remax",
    "REINFORCE with the reward of the greedy response as baseline; one sample a prompt is enough.",
    "Li et al. 2023 (arXiv:2310.10505)",
    "KL coefficient",
    advantage={"name": "remax"},
    policy_loss={"name": "reinforce"},
    aggregation="seq_mean_token_sum",
    kl={"place": "reward", "coef": 0.05, "estimator": "k1"},
)
_preset(
    "opo",
    "REINFORCE with the length-weighted mean of the group, the baseline of least variance; exactly on-policy.",
    "Hao et al. 2025, On-policy RL with optimal reward baseline (arXiv:2505.23585)",
    advantage={"name": "opo"},
    policy_loss={"name": "reinforce"},
    aggregation="seq_mean_token_sum",
)
_preset(
    "gpg",
    "Group policy gradient: no clip, no reference, no critic; rescaled where samples have no score.",
    "Chu et al. 2025 (arXiv:2504.02546)",
    "the rescaling counts samples with a score other than 0, the paper those of groups with a signal",
    advantage={"name": "gpg"},
    policy_loss={"name": "gpg"},
    aggregation="token_mean",
)
_preset(
    "grpo_passk",
    "Trains pass@k: only the best sample of a prompt gets an advantage, its lead over the second best.",
    "Tang et al. 2025 (arXiv:2503.19595)",
    "loss and aggregation as grpo, no KL",
    advantage={"name": "grpo_passk"},
    policy_loss=CLIP,
    aggregation="seq_mean_token_mean",
)
_preset(
    "gdpo",
    "GRPO for several rewards: each part is normalised in its group before the weighted sum.",
    "Liu et al. 2026 (arXiv:2601.05242)",
    "loss and aggregation as grpo, no KL",
    advantage={"name": "gdpo"},
    policy_loss=CLIP,
    aggregation="seq_mean_token_mean",
)
_preset(
    "otb",
    "Optimal token baseline: at each token the group's mean weighted by how much the gradient varied so far.",
    "Li et al. 2026, The optimal token baseline (arXiv:2602.07078)",
    "loss without a ratio, on-policy",
    advantage={"name": "optimal_token_baseline"},
    policy_loss={"name": "reinforce"},
    aggregation="seq_mean_token_sum",
)
_preset(
    "dapo",
    "GRPO with a higher upper clip, token mean, resampling of prompts without a signal, soft length limit, no KL.",
    "Yu et al. 2025 (arXiv:2503.14476: clip 0.2 and 0.28, buffer 4096 of 20480 tokens)",
    "at most 10 rounds of sampling a step",
    advantage=GROUP,
    policy_loss={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    aggregation="token_mean",
    filter={"constant_groups": "resample", "max_rounds": 10},
    more={"reward": {"overlong": {"buffer": 0.2, "factor": 1.0}}},
)
_preset(
    "gspo",
    "GRPO with the ratio of whole sequences (geometric mean over tokens), clipped very close to 1.",
    "Zheng et al. 2025 (arXiv:2507.18071, eq. 5, 7 and section 5.1: clip 3e-4 and 4e-4)",
    advantage=GROUP,
    policy_loss={"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    aggregation="seq_mean_token_mean",
)
_preset(
    "cispo",
    "REINFORCE weighted by a ratio that is capped and carries no gradient, so that no token is ever dropped.",
    "MiniMax-M1 2025 (arXiv:2506.13585, eq. 4 and 5; no lower bound)",
    "the cap of 5 on the ratio",
    advantage=GROUP,
    policy_loss={"name": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    aggregation="token_mean",
)
_preset(
    "sapo",
    "A sigmoid gate of the ratio in place of the clip: gradients fade instead of stopping.",
    "Gao et al. 2025 (arXiv:2511.20347; temperatures 1.0 and 1.05)",
    advantage=GROUP,
    policy_loss={"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05},
    aggregation="seq_mean_token_mean",
)
_preset(
    "dro",
    "Direct reward optimisation: a quadratic pull towards the policy before the update instead of a clip.",
    "Richemond et al. 2024 (arXiv:2405.19107)",
    "the advantage is rloo's where the paper learns a value; beta",
    advantage={"name": "rloo"},
    policy_loss={"name": "dro", "beta": 0.05},
    aggregation="token_mean",
)
_preset(
    "gmpo",
    "GRPO with the geometric mean of token ratios as objective, each clipped to [exp(-0.4), exp(0.4)].",
    "Zhao et al. 2025, GMPO (arXiv:2507.20673)",
    advantage=GROUP,
    policy_loss={"name": "geo_mean", "clip_low": 0.4, "clip_high": 0.4},
    aggregation="seq_mean_token_mean",
)
_preset(
    "clip_cov",
    "Against entropy collapse: a few tokens whose log-prob and advantage vary together lose their gradient.",
    "Cui et al. 2025 (arXiv:2505.22617: share 2e-4, covariance between 1 and 5)",
    "clip as GRPO",
    advantage=GROUP,
    policy_loss={"name": "clip_cov", "clip_low": 0.2, "clip_high": 0.2, "cov_ratio": 2e-4, "cov_low": 1.0,
                 "cov_high": 5.0},
    aggregation="token_mean",
)  # fmt: skip
_preset(
    "kl_cov",
    "Against entropy collapse: the tokens of largest covariance are held near the policy before the update. Acts "
    "from the second optimizer step on a batch: set update.mini_batches.",
    "Cui et al. 2025 (arXiv:2505.22617: share 2e-3, coefficient 1, as in the authors' runs)",
    advantage=GROUP,
    policy_loss={"name": "kl_cov", "cov_ratio": 2e-3, "kl_coef": 1.0},
    aggregation="token_mean",
)
_preset(
    "dppo_tv",
    "A trust region on the change of a token's probability (total variation) instead of its ratio.",
    "Qi et al. 2026 (arXiv:2602.04879; threshold 0.15)",
    advantage=GROUP,
    policy_loss={"name": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15, "dual_clip": 20.0},
    aggregation="token_mean",
)
_preset(
    "dppo_kl",
    "A trust region on the Bernoulli KL of a token's probability instead of its ratio.",
    "Qi et al. 2026 (arXiv:2602.04879; threshold 0.05)",
    advantage=GROUP,
    policy_loss={"name": "dppo_kl", "eps": 0.05, "dual_clip": 20.0},
    aggregation="token_mean",
)
_preset(
    "scale_rl",
    "CISPO with batch-normalised advantages, the mean over prompts, fp32 logits, no constant groups, and prompts that "
    "are solved retired.",
    "Khatri et al. 2025, ScaleRL (arXiv:2510.13786)",
    "the cap of 5 on the ratio; synchronous; the length limit is a hard one",
    advantage={"name": "reinforce_pp_baseline"},
    policy_loss={"name": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    aggregation="prompt_mean",
    filter={"constant_groups": "drop", "retire_pass_rate": 0.9},
    more={"model": {"fp32_head": True}},
)


def preset_values() -> dict[str, dict[str, Any]]:
    """What the config loader lays beneath the user's file."""
    return {name: preset.values for name, preset in PRESETS.items()}
