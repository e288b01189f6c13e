"""Credit by what still comes: each token is credited with the rewards from it on."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from verl.algos.advantages.inputs import ADVANTAGES, Credit, CreditInputs
from verl.algos.segments import Segments
from verl.config.base import Section


class ReinforcePP(Section):
    """Constants of reinforce_pp."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of a token step."""


def reward_to_go(s: Segments, rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """[T] -> [T] G = r + gamma G of the next counted token; 0 where the mask is 0, which costs no discount."""
    out = s.dense(rewards)  # 0 behind the last counted token, so G starts at 0 there
    for k in range(out.shape[1] - 2, -1, -1):
        out[:, k] += gamma * out[:, k + 1]
    return s.flat(out)


@ADVANTAGES.register("reinforce_pp", config=ReinforcePP)
def reinforce_pp(x: CreditInputs, c: ReinforcePP) -> Credit:
    """A = whiten(G) over the counted tokens of the whole batch, G = r + gamma G from the end (arXiv:2501.03262).

    Masked tokens (tool observations) carry G on with no discount. returns = G. Samples of a prompt are not compared.
    """
    returns = reward_to_go(x.segments, x.rewards, c.gamma)
    return x.segments.whiten(returns), returns


@ADVANTAGES.register("remax", needs=("greedy_reward",))
def remax(x: CreditInputs, c: None) -> Credit:
    """A = G - b, G the sum of rewards from a token on, b the score of the prompt's greedy response (arXiv:2310.10505).

    returns = G. Samples of a prompt are not compared.
    """
    assert x.greedy_reward is not None
    returns = reward_to_go(x.segments, x.rewards)
    return returns - x.segments.spread(x.greedy_reward), returns
