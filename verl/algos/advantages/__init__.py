"""Advantage estimators: who gets credit for the reward. Each has a numpy twin in tests/reference."""

from verl.algos.advantages.gae import GAE, gae
from verl.algos.advantages.group import GRPO, grpo
from verl.algos.advantages.inputs import ADVANTAGES, Credit, CreditInputs, Groups

__all__ = ["ADVANTAGES", "GAE", "GRPO", "Credit", "CreditInputs", "Groups", "gae", "grpo"]
