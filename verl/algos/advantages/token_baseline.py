"""Credit against a baseline of its own for each position."""

from __future__ import annotations

import torch

from verl.algos.advantages.inputs import ADVANTAGES, Credit, CreditInputs, Groups
from verl.algos.advantages.reward_to_go import reward_to_go


@ADVANTAGES.register("optimal_token_baseline", needs=("group_id", "old_logprobs", "sum_pi_squared"))
def optimal_token_baseline(x: CreditInputs, c: None) -> Credit:
    """A = G - b_t, b_t = sum_i G W / (sum_i W + 1e-8) over the samples i of the prompt that count position t.

    G: sum of rewards from a token on; W: sum up to it of w = 1 - 2 pi + sum_v pi_v^2, the squared norm of the gradient
    on the logits, as the proxy of gradient variance (arXiv:2602.07078). Samples are aligned by position in their
    sequence. Behind the end of the second-longest sample, and so in a group of one, b = 0. returns = G.
    """
    assert x.old_logprobs is not None and x.sum_pi_squared is not None
    s = x.segments
    returns, position = reward_to_go(s, x.rewards), s.position()
    weight = s.flat(s.dense(1 - 2 * x.old_logprobs.exp() + x.sum_pi_squared).cumsum(1))
    prompts = Groups.of(x.group, s.counts > 0)
    group = prompts.place[s.seq]

    cells = Groups.of(group * len(position) + position, s.mask)
    baseline = (cells.sum(returns * weight) / (cells.sum(weight) + 1e-8))[cells.place]

    compared = position <= prompts.top_two(s.end(), -1)[1][group]
    return s.zero(returns - torch.where(compared, baseline, torch.zeros_like(baseline))), returns
