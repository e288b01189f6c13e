"""The catalogue of batch columns. A column that is not here cannot be put into a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    name: str
    level: Literal["token", "seq"]
    dtype: Literal["int64", "float32", "bool"]
    doc: str
    wide: bool = False
    """Whether a row has several values: [N, K] instead of [N]."""


SCHEMA: dict[str, Column] = {
    c.name: c
    for c in (
        Column("token_ids", "token", "int64", "prompt, response and observations, flat"),
        Column("loss_mask", "token", "bool", "1 where the policy sampled the token"),
        Column("rollout_logprobs", "token", "float32", "log-prob as reported by the sampler; 0 where loss_mask is 0"),
        Column("old_logprobs", "token", "float32", "log-prob of the policy before the update"),
        Column("ref_logprobs", "token", "float32", "log-prob of the frozen reference"),
        Column("values", "token", "float32", "V of the state before the token"),
        Column("sum_pi_squared", "token", "float32", "sum over the vocabulary of the policy's squared probabilities"),
        Column("rollout_weights", "token", "float32", "importance weight of the sampler's law, where it is corrected"),
        Column("advantages", "token", "float32", "advantage of the token"),
        Column("chosen", "token", "bool", "what a policy loss chose from the whole mini-batch before any part"),
        Column("returns", "token", "float32", "target of the critic"),
        Column(
            "token_rewards", "token", "float32", "outcome reward on the last sampled token, less any KL in the reward"
        ),
        Column("group_id", "seq", "int64", "number of the prompt's group within the batch"),
        Column("reward", "seq", "float32", "total scalar reward"),
        Column("greedy_reward", "seq", "float32", "total reward of the greedy response to the same prompt"),
        Column("reward_parts", "seq", "float32", "components of the reward, unweighted", wide=True),
        Column("reward_weights", "seq", "float32", "weights of reward_parts, the same in every row", wide=True),
        Column("group_tokens", "seq", "float32", "counted tokens of all samples of the prompt"),
        Column("excluded", "seq", "bool", "leaves the loss and every statistic (aborted, failed, rejected)"),
        Column("version", "seq", "int64", "weight version that drew the first token"),
        Column("truncated", "seq", "bool", "the completion ended by length, not by an end token"),
    )
}
