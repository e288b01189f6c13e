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


class CorrectionConfig(Section):
    """The sampler's law is never the trainer's to the last bit. The gap is measured on every run; this corrects it."""

    old_logprobs: Literal["auto", "recompute", "skip", "bypass"] = "auto"
    """Where log-probs before the update come from. `recompute`: a forward before it. `skip`: the update's own forward,
    for one update a step (ratio exactly 1). `auto`: skip where it is possible, else recompute. `bypass`: the sampler's.
    """
    level: Literal["off", "token", "sequence"] = "off"
    """Weigh the policy loss by exp(old - rollout log-prob): of each token, or summed over its sequence."""
    kind: Literal["tis", "icepop"] = "tis"
    """`tis`: weights are cut at `cap`. `icepop`: weights outside [low, high] are 0."""
    cap: float = Field(2.0, gt=0)
    """Largest weight (tis)."""
    low: float = Field(0.5, ge=0)
    """Smallest weight that counts (icepop)."""
    high: float = Field(5.0, gt=0)
    """Largest weight that counts (icepop)."""
    normalize: bool = False
    """Divide the weights by their mean over the batch."""
    reject: Literal["off", "token", "sequence_sum", "sequence_mean", "sequence_max"] = "off"
    """Leave out tokens, or whole sequences by the sum, mean or maximum over their tokens, whose `statistic` is out of
    bounds; they leave numerator and denominator.
    """
    statistic: Literal["k1", "k2", "k3"] = "k1"
    """With x = old - rollout log-prob: k1 = -x, bounded as the ratio exp(x); k2 = x^2 / 2; k3 = exp(x) - 1 - x."""
    reject_low: float | None = Field(None, ge=0)
    """Lowest ratio that stays (k1); null: 1 / reject_high."""
    reject_high: float | None = Field(None, gt=0)
    """Highest ratio (k1) or value (k2, k3) that stays."""


class FilterConfig(Section):
    """Prompts and samples that teach nothing."""

    constant_groups: Literal["keep", "drop", "resample"] = "keep"
    """Prompts whose samples all score the same: kept, dropped (zero-variance filter), or dropped and replaced by other
    prompts until the batch is full (dynamic sampling).
    """
    metric: str = "score"
    """What must differ within a group: `score` (reward before shaping of lengths), or the name of a reward part."""
    max_rounds: int = Field(4, ge=1)
    """Most rounds of sampling for one step (resample)."""
    when_short: Literal["continue", "stop"] = "continue"
    """After the last round: train on the groups there are, or stop the run."""
    retire_pass_rate: float | None = Field(None, gt=0, le=1)
    """Prompts are not sampled again once this share of their samples passed the verifier; null: all stay. When fewer
    than trainer.prompts_per_step are left, all are sampled again.
    """
    exclude_truncated: bool = False
    """Leave out responses that were cut at the longest length."""


class AlgorithmConfig(Section):
    """A preset fills this section; every value can then be set by hand."""

    name: str = "ppo"
    """Preset: `ppo`, `grpo`, `dapo` and others; `verl algorithms` lists them with their sources."""
    plugins: tuple[str, ...] = ()
    """Python files or modules (`FILE.py`, `package.module`) imported first: they may register advantages and losses."""
    advantage: Component = Component(name="gae")
    """Advantage estimator and its constants."""
    policy_loss: Component = Component(name="ppo_clip")
    """Policy loss and its constants."""
    aggregation: str = "token_mean"
    """How token losses become one number: token_mean, token_sum, seq_mean_token_sum, seq_mean_token_mean,
    seq_mean_token_sum_norm, prompt_mean.
    """
    aggregation_length: int | None = Field(None, ge=1)
    """The fixed length that seq_mean_token_sum_norm divides by; null: rollout.max_response_tokens."""
    entropy_coef: float = 0.0
    """Bonus for entropy in the loss."""
    kl: KLConfig = KLConfig()
    """Distance to the reference."""
    rollout_correction: CorrectionConfig = CorrectionConfig()
    """What is done about the gap between sampler and trainer."""
    filter: FilterConfig = FilterConfig()
    """Prompts and samples that are left out."""


class UpdateConfig(Section):
    """How one step's samples become optimizer steps."""

    epochs: int = Field(1, ge=1)
    """Passes over the samples of a step."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps a pass; groups of one prompt stay together."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Most tokens in one forward and backward: null is 2,048 on a CPU, which is as fast as more, and 8,192 on a GPU.
    Changes memory and speed, never the gradient.
    """
    activation_checkpointing: bool = False
    """Keep only what each layer reads, and compute the layer once more in the backward pass: less memory for long
    micro-batches, about a third more arithmetic. Same gradients. Actor and critic.
    """
    cpu_offload: bool = False
    """On GPUs, keep what FSDP shards on the host: weights between uses, gradients and the optimizer, which steps there.
    Less GPU memory, slower steps, same gradients. Changes nothing on a CPU. Actor and critic.
    """
    offload_between: bool = False
    """While the run generates and scores, keep masters and moments on the host and give gradient buffers back; they
    come back for each update. More GPU memory for keys, values and logits, slower steps, same numbers. On a CPU only
    the gradient buffers are given back. Actor and critic.
    """
    share_prompt: bool = True
    """Compute what prompts and samples begin with in common once. Same gradients, to rounding (native models)."""
