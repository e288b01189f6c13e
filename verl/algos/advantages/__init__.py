"""Advantage estimators: who gets credit for the reward. Each has a numpy twin in tests/reference."""

from verl.algos.advantages.gae import GAE, gae
from verl.algos.advantages.group import GRPO, gdpo, gpg, grpo, grpo_passk, opo, reinforce_pp_baseline, rloo
from verl.algos.advantages.inputs import ADVANTAGES, Credit, CreditInputs, Groups
from verl.algos.advantages.reward_to_go import ReinforcePP, reinforce_pp, remax
from verl.algos.advantages.token_baseline import optimal_token_baseline

__all__ = [
    "ADVANTAGES",
    "GAE",
    "GRPO",
    "Credit",
    "CreditInputs",
    "Groups",
    "ReinforcePP",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
]
