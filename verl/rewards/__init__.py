"""Layer 1: what a response is worth. Verifiers, user functions, and their sum with a reward model's scores."""

from verl.rewards import mathematics  # noqa: F401  (registers its verifier)
from verl.rewards.build import build_rewards
from verl.rewards.composer import RewardComposer, Rewards
from verl.rewards.functions import RewardFunction
from verl.rewards.verifiers import VERIFIERS, Verifier

__all__ = ["VERIFIERS", "RewardComposer", "RewardFunction", "Rewards", "Verifier", "build_rewards"]
