"""An algorithm as the trainer sees it: which columns it needs, credit, and the loss of a micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algos.advantages import ADVANTAGES, CreditInputs
from verl.algos.aggregate import Aggregation, Denominators
from verl.algos.kl import KLController, check_estimator, kl_values
from verl.algos.policy_losses import POLICY_LOSSES, PolicyInputs
from verl.algos.segments import Segments
from verl.config.loader import constants
from verl.config.run import RunConfig
from verl.core.batch import Batch
from verl.core.errors import ConfigError
from verl.core.metrics import Metrics


class Algorithm:
    """Built once from the config; unknown names and constants fail here, before any model loads."""

    def __init__(self, cfg: RunConfig):
        a = cfg.algorithm
        self.cfg = a
        self.advantage = ADVANTAGES[a.advantage.name]
        self.policy_loss = POLICY_LOSSES[a.policy_loss.name]
        self.advantage_constants = constants(a.advantage, self.advantage.config, "algorithm.advantage")
        self.loss_constants = constants(a.policy_loss, self.policy_loss.config, "algorithm.policy_loss")
        self.aggregation = Aggregation(a.aggregation, a.aggregation_length)
        check_estimator(a.kl.estimator)
        self.kl_place = a.kl.place if a.kl.coef > 0 else "off"
        self.kl_controller = KLController(a.kl)
        self.needs = self._needs(cfg)
        self._check(cfg)

    def _needs(self, cfg: RunConfig) -> frozenset[str]:
        """Columns to be made by models. With one update a step, the log-probs of the update's own forward are the
        old ones, exactly, so no extra forward is made unless the reward needs them first."""
        needs = set(self.advantage.needs) | set(self.policy_loss.needs)
        one_update = cfg.update.epochs * cfg.update.mini_batches == 1
        if one_update and self.kl_place != "reward":
            needs.discard("old_logprobs")
        if self.kl_place == "reward":
            needs |= {"old_logprobs", "ref_logprobs"}
        if self.kl_place == "loss":
            needs.add("ref_logprobs")
        return frozenset(needs)

    def _check(self, cfg: RunConfig) -> None:
        if "group_id" in self.advantage.needs and cfg.rollout.n < 2:
            raise ConfigError(
                f"rollout.n: {self.advantage.name!r} compares the samples of a prompt, so it needs at least 2, got "
                f"{cfg.rollout.n}; set rollout.n=8 (--samples_per_prompt 8), or algorithm.name=ppo"
            )
        if self.kl_place == "loss" and self.cfg.kl.estimator == "k1":
            raise ConfigError(
                "algorithm.kl.estimator: the gradient of k1 in the loss is zero on average, so it would do nothing; "
                "set k3 or `k1+` (the value of k1 with the gradient of k2), or algorithm.kl.place=reward"
            )
        if cfg.update.mini_batches > cfg.trainer.prompts_per_step:
            raise ConfigError(
                f"update.mini_batches: {cfg.update.mini_batches} mini-batches cannot be made of "
                f"trainer.prompts_per_step={cfg.trainer.prompts_per_step} prompts; groups are not split"
            )

    def credit(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Token rewards (with the KL where it belongs), advantages and returns. Reads no model."""
        s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
        rewards = torch.where(s.last(), batch["reward"][s.seq], torch.zeros(()))
        metrics = Metrics()
        if self.kl_place == "reward":
            kl = s.zero(kl_values(self.cfg.kl.estimator, batch["old_logprobs"], batch["ref_logprobs"]))
            rewards = rewards - self.kl_controller.coef * kl
            self._steer(s, kl, metrics)
        if self.kl_place != "off" and "old_logprobs" in batch:
            gap = s.zero(batch["old_logprobs"] - batch["ref_logprobs"])
            metrics.mean("kl", float(s.mean_per_seq(gap).sum()), float((s.counts > 0).sum()))
        if "old_logprobs" in batch:
            metrics = Metrics.merge([metrics, mismatch(s, batch["old_logprobs"], batch["rollout_logprobs"])])
        inputs = CreditInputs(s, rewards, batch["group_id"], batch.cols.get("values"))
        advantages, returns = self.advantage.fn(inputs, self.advantage_constants)
        metrics.mean("advantage/abs", float(advantages.abs().sum()), float(s.mask.sum()))
        cols = {"advantages": advantages, "token_rewards": rewards}
        return batch.with_(**cols, **({} if returns is None else {"returns": returns})), metrics

    def _steer(self, s: Segments, kl: Tensor, metrics: Metrics) -> None:
        counted = s.counts > 0
        metrics.mean("kl_coef", self.kl_controller.coef, 1.0)
        self.kl_controller.update(
            float(s.mean_per_seq(kl)[counted].mean()) if counted.any() else 0.0, int(counted.sum())
        )

    def actor_loss(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Batch, total: Denominators
    ) -> tuple[Tensor, Metrics]:
        """Scalar share of the mini-batch loss: policy + coef * KL - coef * entropy, one aggregation for all three."""
        s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
        known = "old_logprobs" in batch
        old = batch["old_logprobs"] if known else logprobs.detach()
        loss, metrics = self.policy_loss.fn(PolicyInputs(s, logprobs, old, batch["advantages"]), self.loss_constants)
        n = float(s.mask.sum())
        metrics.mean("actor/policy_loss", float(s.zero(loss.detach()).sum()), n)
        if not known:
            metrics = Metrics.merge([metrics, mismatch(s, old, batch["rollout_logprobs"])])
        if self.kl_place == "loss":
            kl = kl_values(self.cfg.kl.estimator, s.zero(logprobs), s.zero(batch["ref_logprobs"]))
            loss = loss + self.cfg.kl.coef * kl
            metrics.mean("actor/kl_loss", float(s.zero(kl.detach()).sum()), n)
            if not known:
                gap = s.zero(logprobs.detach() - batch["ref_logprobs"])
                metrics.mean("kl", float(s.mean_per_seq(gap).sum()), float((s.counts > 0).sum()))
        if entropy is not None:
            loss = loss - self.cfg.entropy_coef * s.zero(entropy)
            metrics.mean("actor/entropy", float(s.zero(entropy.detach()).sum()), n)
        return self.aggregation(loss, s, total), metrics

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"kl_controller": self.kl_controller.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])


def mismatch(s: Segments, logprobs: Tensor, rollout_logprobs: Tensor) -> Metrics:
    """How far the trainer's log-probs are from the sampler's: mean and max of the absolute difference."""
    gap = s.zero(logprobs - rollout_logprobs).abs()
    out = Metrics().mean("rollout/logprob_gap", float(gap.sum()), float(s.mask.sum()))
    return out.max("rollout/logprob_gap_max", float(gap.max()) if len(gap) else 0.0)
