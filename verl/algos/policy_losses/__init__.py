"""Policy losses: per token, before any reduction. Each has a numpy twin in tests/reference."""

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.algos.policy_losses.ppo_clip import PPOClip, ppo_clip

__all__ = ["POLICY_LOSSES", "PPOClip", "PolicyInputs", "PolicyLoss", "log_ratio", "ppo_clip"]
