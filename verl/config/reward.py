"""Rewards: total = reward model + verifier + sum(weight * function)."""

from typing import Literal

from pydantic import Field

from verl.config.base import Section


class RewardFunctionConfig(Section):
    """One user function `fn(prompts, responses) -> list[float]`."""

    path: str
    """`FILE.py:NAME` or `package.module:NAME`."""
    weight: float = 1.0
    """Its weight in the total."""


class OverlongConfig(Section):
    """Soft punishment of long responses (DAPO, arXiv:2503.14476, eq. 13): a reward part called `overlong`."""

    buffer: float = Field(0.0, ge=0, le=1)
    """Share of the longest response over which the punishment grows from 0 to `factor`; 0: none."""
    factor: float = Field(1.0, gt=0)
    """Punishment at the longest response."""


class RewardConfig(Section):
    """What a response is worth."""

    model_path: str | None = Field(None, min_length=1)
    """Sequence classification model with one output (a reward model); null: none."""
    verifier: str = "auto"
    """Verifier of responses with a reference: `auto` takes the data set's own, unless a reward model or function is
    given; a name (`exact`, `gsm8k`, `math`, ...) forces one, beside those too; `off` none.
    """
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Reward functions and their weights."""
    stream: bool | Literal["auto"] = "auto"
    """Score prompts whose samples are done, in one thread, while others are still sampled. `auto`: with the verifier
    (`math` aside, whose deadline needs the main thread); functions see a round of sampling at once, as always. true:
    functions too; a call then gets all samples of some of the prompts, outside the main thread. false: all afterwards.
    """
    overlong: OverlongConfig = OverlongConfig()
    """Punishment of responses near rollout.max_response_tokens; training only."""
    max_length: int = Field(4096, ge=1)
    """Longest text the reward model reads, in tokens; longer ones are cut on the left and counted."""
