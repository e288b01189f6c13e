"""Combinations of algorithm settings that make no sense. Each error names the value to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.algos.correction import check_correction, refuse_idle
from verl.algos.kl import check_estimator
from verl.config.run import RunConfig
from verl.core.errors import ConfigError
from verl.core.registry import Entry


def check_algorithm(
    cfg: RunConfig, advantage: Entry[Callable[..., Any]], policy_loss: Entry[Callable[..., Any]], needs: frozenset[str]
) -> None:
    """ConfigError for the first thing that would do nothing, or not what it says. needs: as Algorithm.needs."""
    check_estimator(cfg.algorithm.kl.estimator)
    check_correction(cfg.algorithm.rollout_correction)
    _check_switched_off(cfg)
    _check_samples(cfg, advantage)
    _check_kl(cfg, advantage)
    _check_old_logprobs(cfg, policy_loss, needs)
    if cfg.update.mini_batches > cfg.trainer.prompts_per_step:
        raise ConfigError(
            f"update.mini_batches: {cfg.update.mini_batches} mini-batches cannot be made of "
            f"trainer.prompts_per_step={cfg.trainer.prompts_per_step} prompts; groups are not split"
        )


def _check_switched_off(cfg: RunConfig) -> None:
    """Values that were changed while what they belong to is off."""
    a = cfg.algorithm
    if a.aggregation != "seq_mean_token_sum_norm":
        refuse_idle(a, "algorithm", ("aggregation_length",), "aggregation is not seq_mean_token_sum_norm")
    if a.filter.constant_groups == "keep":
        refuse_idle(a.filter, "algorithm.filter", ("metric",), "constant_groups is keep")
    if a.kl.adaptive_target is None:
        refuse_idle(a.kl, "algorithm.kl", ("adaptive_horizon",), "adaptive_target is null")
    if a.kl.coef == 0:
        refuse_idle(a.kl, "algorithm.kl", ("adaptive_target",), "coef is 0")
    if cfg.reward.overlong.buffer == 0:
        refuse_idle(cfg.reward.overlong, "reward.overlong", ("factor",), "buffer is 0")


def _check_samples(cfg: RunConfig, advantage: Entry[Callable[..., Any]]) -> None:
    remedy = f"at least 2, got {cfg.rollout.n}; set rollout.n=8 (--samples_per_prompt 8)"
    if "group_id" in advantage.needs and cfg.rollout.n < 2:
        raise ConfigError(
            f"rollout.n: {advantage.name!r} compares the samples of a prompt, so it needs {remedy}, "
            "or algorithm.name=ppo"
        )
    constant = cfg.algorithm.filter.constant_groups
    if constant != "keep" and cfg.rollout.n < 2:
        raise ConfigError(
            f"rollout.n: algorithm.filter.constant_groups={constant} would leave out every prompt; it needs {remedy}, "
            "or algorithm.filter.constant_groups=keep"
        )


def _check_kl(cfg: RunConfig, advantage: Entry[Callable[..., Any]]) -> None:
    kl = cfg.algorithm.kl
    if kl.coef == 0 or kl.place == "off":
        return
    if kl.place == "loss" and kl.estimator == "k1":
        raise ConfigError(
            "algorithm.kl.estimator: the gradient of k1 in the loss is zero on average, so it would do nothing; "
            "set k3 or `k1+` (the value of k1 with the gradient of k2), or algorithm.kl.place=reward"
        )
    if kl.place == "reward" and kl.estimator.endswith("+"):
        raise ConfigError(
            f"algorithm.kl.estimator: the + of {kl.estimator!r} is about gradients, and a KL in the reward has none; "
            f"set {kl.estimator[:-1]}, or algorithm.kl.place=loss"
        )
    if kl.place == "reward" and "reward_parts" in advantage.needs:
        raise ConfigError(
            f"algorithm.kl.place: {advantage.name!r} reads the parts of the reward, so a KL in the reward would do "
            "nothing; set algorithm.kl.place=loss with algorithm.kl.estimator=k3"
        )


def _check_old_logprobs(cfg: RunConfig, policy_loss: Entry[Callable[..., Any]], needs: frozenset[str]) -> None:
    correction = cfg.algorithm.rollout_correction
    path = "algorithm.rollout_correction.old_logprobs"
    updates = cfg.update.epochs * cfg.update.mini_batches
    if correction.old_logprobs == "skip":
        if updates > 1:
            raise ConfigError(
                f"{path}: skip takes the log-probs of the update's own forward, which needs one update a step, and "
                f"update.epochs * update.mini_batches is {updates}; set auto"
            )
        if "old_logprobs" in needs:
            raise ConfigError(
                f"{path}: this algorithm reads log-probs before the update (KL in the reward, rejection, normalised "
                "weights or the advantage), so skip is not possible; set auto"
            )
    if correction.old_logprobs == "bypass":
        if "sum_pi_squared" in needs:
            raise ConfigError(f"{path}: this advantage needs the policy's own forward before the update; set auto")
        if "old_logprobs" not in policy_loss.needs:
            raise ConfigError(
                f"{path}: {policy_loss.name!r} has no ratio that bypass could act on; set auto, and "
                "algorithm.rollout_correction.level=token to correct the sampler's law"
            )
