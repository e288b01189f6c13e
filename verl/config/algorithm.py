"""The algorithm: which advantage, which loss, and the KL to the reference."""

from typing import Literal

from pydantic import Field

from verl.config.base import Component, Section


class KLConfig(Section):
    """Distance to the frozen reference."""

    place: Literal["reward", "loss", "off"] = "reward"
    """`reward`: subtracted from each token's reward (PPO). `loss`: added to the loss (GRPO). `off`: no reference is
    built.
    """
    coef: float = Field(0.1, ge=0)
    """Its coefficient; 0 is the same as off."""
    estimator: str = "k1"
    """k1, abs, k2, k3 on log-prob differences; a `+` after it takes its value with the gradient of k2."""
    adaptive_target: float | None = Field(None, gt=0)
    """KL per token that the coefficient is steered to (place: reward); null keeps it fixed."""
    adaptive_horizon: float = Field(10000, gt=0)
    """Sequences over which the steering acts."""


class AlgorithmConfig(Section):
    """A preset fills this section; every value can then be set by hand."""

    name: str = "ppo"
    """Preset: `ppo`, `grpo`. `verl algorithms` lists them with their sources."""
    advantage: Component = Component(name="gae")
    """Advantage estimator and its constants."""
    policy_loss: Component = Component(name="ppo_clip")
    """Policy loss and its constants."""
    aggregation: str = "token_mean"
    """How token losses become one number: token_mean, token_sum, seq_mean_token_sum, seq_mean_token_mean,
    seq_mean_token_sum_norm.
    """
    aggregation_length: int | None = Field(None, ge=1)
    """The fixed length that seq_mean_token_sum_norm divides by."""
    entropy_coef: float = 0.0
    """Bonus for entropy in the loss."""
    kl: KLConfig = KLConfig()
    """Distance to the reference."""


class UpdateConfig(Section):
    """How one step's samples become optimizer steps."""

    epochs: int = Field(1, ge=1)
    """Passes over the samples of a step."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps a pass; groups of one prompt stay together."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Most tokens in one forward and backward. Changes memory and speed, never the gradient."""
    share_prompt: bool = True
    """Compute what prompts and samples begin with in common once. Same gradients, to rounding (native models)."""
