"""An algorithm as the trainer sees it: which columns it needs, credit, and the loss of a micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algos.advantages import ADVANTAGES, CreditInputs
from verl.algos.aggregate import Aggregation, Denominators, tokens_per_prompt
from verl.algos.checks import check_algorithm
from verl.algos.contract import check_credit, check_entry, check_loss, two
from verl.algos.correction import effective_sample_size, importance_weights, kept, mismatch
from verl.algos.kl import KLController, kl_values
from verl.algos.policy_losses import POLICY_LOSSES, PolicyInputs
from verl.algos.segments import Segments
from verl.config.loader import constants
from verl.config.run import RunConfig
from verl.core.batch import Batch
from verl.core.errors import ConfigError
from verl.core.metrics import Metrics
from verl.core.outside import load_module

LOSS_COLUMNS = ("old_logprobs",)
CREDIT_COLUMNS = ("values", "greedy_reward", "reward_parts", "reward_weights", "old_logprobs", "sum_pi_squared")
ADVANTAGE_COLUMNS = ("group_id", *CREDIT_COLUMNS)


class Algorithm:
    """Built once from the config; unknown names and constants fail here, before any model loads."""

    def __init__(self, cfg: RunConfig):
        a = cfg.algorithm
        self.cfg = a
        for plugin in a.plugins:
            load_module(plugin, "algorithm.plugins", ConfigError)
        self.advantage = ADVANTAGES[a.advantage.name]
        self.policy_loss = POLICY_LOSSES[a.policy_loss.name]
        check_entry("algorithm.advantage", self.advantage, ADVANTAGE_COLUMNS)
        check_entry("algorithm.policy_loss", self.policy_loss, LOSS_COLUMNS)
        self.advantage_constants = constants(a.advantage, self.advantage.config, "algorithm.advantage")
        self.loss_constants = constants(a.policy_loss, self.policy_loss.config, "algorithm.policy_loss")
        self.aggregation = Aggregation(a.aggregation, a.aggregation_length or cfg.rollout.max_response_tokens)
        self.kl_place = a.kl.place if a.kl.coef > 0 else "off"
        self.kl_controller = KLController(a.kl)
        self.correction = a.rollout_correction
        self.bypass = self.correction.old_logprobs == "bypass"
        self.has_reward_model = cfg.reward.model_path is not None
        self.needs = self._needs(cfg)
        check_algorithm(cfg, self.advantage, self.policy_loss, self.needs)

    @property
    def roles(self) -> list[str]:
        """Roles that the run has models for."""
        own = ["actor"] + ["ref"] * ("ref_logprobs" in self.needs) + ["critic"] * ("values" in self.needs)
        return own + ["reward"] * self.has_reward_model

    @property
    def described(self) -> str:
        """What was put together, in a line."""
        kl = self.cfg.kl
        distance = "no KL" if self.kl_place == "off" else f"KL {kl.estimator} x {kl.coef:g} in the {self.kl_place}"
        names = f"advantage {self.advantage.name}, loss {self.policy_loss.name}, {self.cfg.aggregation}"
        return f"Algorithm {self.cfg.name}: {names}, {distance}"

    def _needs(self, cfg: RunConfig) -> frozenset[str]:
        """Columns that must be made before credit. With one update a step the log-probs of the update's own forward
        are the old ones, exactly, so no extra forward is made unless credit or the correction reads them first.
        """
        credit = set(self.advantage.needs) - {"group_id"}
        if self.kl_place == "reward":
            credit |= {"old_logprobs", "ref_logprobs"}
        one_update = cfg.update.epochs * cfg.update.mini_batches == 1
        weighs = self.correction.level != "off"
        if self.correction.reject != "off" or (weighs and (self.correction.normalize or not one_update)):
            credit.add("old_logprobs")
        needs = credit | set(self.policy_loss.needs)
        asked = self.correction.old_logprobs
        if asked == "recompute":
            needs.add("old_logprobs")
        elif asked == "bypass" or (one_update and "old_logprobs" not in credit):
            needs.discard("old_logprobs")
        if self.kl_place == "loss":
            needs.add("ref_logprobs")
        return frozenset(needs)

    def credit(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Token rewards (with the KL where it belongs), advantages and returns. Reads no model.

        Excluded and rejected samples leave the loss mask, so that they are in no statistic and no denominator.
        """
        if self.bypass:
            batch = batch.with_(old_logprobs=batch["rollout_logprobs"])
        s, keep, metrics = self._counted(batch)
        rewards = torch.where(s.last(), batch["reward"][s.seq], torch.zeros(()))
        if self.kl_place == "reward":
            kl = s.zero(kl_values(self.cfg.kl.estimator, batch["old_logprobs"], batch["ref_logprobs"]))
            rewards = rewards - self.kl_controller.coef * kl
            self._steer(s, kl, metrics)
        if self.kl_place != "off" and "old_logprobs" in batch:
            gap = s.zero(batch["old_logprobs"] - batch["ref_logprobs"])
            metrics.mean("kl", float(s.mean_per_seq(gap).sum()), float((s.counts > 0).sum()))
        columns = {name: batch.cols.get(name) for name in CREDIT_COLUMNS}
        inputs = CreditInputs(s, rewards, batch["group_id"], **columns)
        advantages, returns = two(self.advantage.fn(inputs, self.advantage_constants), "advantage", self.advantage.name)
        check_credit(self.advantage.name, inputs, advantages, returns)
        metrics.mean("advantage/abs", float(s.zero(advantages).abs().sum()), float(s.mask.sum()))
        cols = {"advantages": advantages, "token_rewards": rewards, "loss_mask": keep}
        if returns is not None:
            cols["returns"] = returns
        return self._for_the_update(batch.with_(**cols)), metrics

    def _counted(self, batch: Batch) -> tuple[Segments, Tensor, Metrics]:
        """(what credit counts; [T] bool: what the update counts; metrics). A sample that loses some tokens keeps its
        credit; one that loses all leaves its group.
        """
        s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
        if "excluded" in batch:
            s = Segments(s.seq, s.mask & ~batch["excluded"][s.seq], s.num_seqs)
        metrics = Metrics().mean("credit/excluded", float((s.counts == 0).sum()), float(s.num_seqs))
        keep = s.mask
        if "old_logprobs" in batch:
            old, rollout = batch["old_logprobs"], batch["rollout_logprobs"]
            if not self.bypass:
                metrics = Metrics.merge([metrics, mismatch(s, old, rollout)])
            if self.correction.reject != "off":
                keep = s.mask & kept(s, old, rollout, self.correction)
                metrics.mean("rollout/rejected", float((s.mask & ~keep).sum()), float(s.mask.sum()))
                left = Segments(s.seq, keep, s.num_seqs).counts > 0
                s = Segments(s.seq, s.mask & left[s.seq], s.num_seqs)
        if "group_id" in self.advantage.needs:
            alone = torch.unique(batch["group_id"][s.counts > 0], return_counts=True)[1] == 1
            metrics.sum("credit/single_groups", float(alone.sum()))
        return s, keep, metrics

    def _for_the_update(self, batch: Batch) -> Batch:
        """Columns that the loss of a part reads but only the whole batch can tell."""
        s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
        cols = {}
        if self.correction.level != "off" and "old_logprobs" in batch:
            old, rollout = batch["old_logprobs"], batch["rollout_logprobs"]
            cols["rollout_weights"] = importance_weights(s, old, rollout, self.correction)
        if self.cfg.aggregation == "prompt_mean":
            cols["group_tokens"] = tokens_per_prompt(s, batch["group_id"]).float()
        return batch.with_(**cols)

    def _steer(self, s: Segments, kl: Tensor, metrics: Metrics) -> None:
        counted = s.counts > 0
        metrics.mean("kl_coef", self.kl_controller.coef, 1.0)
        if counted.any():
            self.kl_controller.update(float(s.mean_per_seq(kl)[counted].mean()), int(counted.sum()))

    def prepare(self, batch: Batch, logprobs: Tensor, seed: int) -> Batch:
        """The mini-batch with the column `chosen`, for a loss that looks at all of it before any part.

        logprobs [T]: of the policy as it is now. Call it where `policy_loss.prepare` is not None.
        """
        assert self.policy_loss.prepare is not None
        s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
        old = batch.cols.get("old_logprobs", logprobs)
        inputs = PolicyInputs(s, logprobs, old, batch["advantages"])
        return batch.with_(chosen=self.policy_loss.prepare(inputs, self.loss_constants, seed))

    def actor_loss(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Batch, total: Denominators, first: bool = True
    ) -> tuple[Tensor, Metrics]:
        """Scalar share of the mini-batch loss: policy + coef * KL - coef * entropy, one aggregation for all three.

        first: these are still the weights that sampled; only then does the gap to the sampler (and, where nothing was
        scored before, to the reference) say what it is meant to say.
        """
        s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
        now, rollout = logprobs.detach(), batch["rollout_logprobs"]
        known = "old_logprobs" in batch
        old = batch["old_logprobs"] if known else now
        inputs = PolicyInputs(s, logprobs, old, batch["advantages"], batch.cols.get("chosen"))
        loss, metrics = two(self.policy_loss.fn(inputs, self.loss_constants), "policy_loss", self.policy_loss.name)
        check_loss(self.policy_loss.name, loss, logprobs, metrics)
        if self.correction.level != "off":
            weights = batch.cols.get("rollout_weights")
            loss = loss * (importance_weights(s, now, rollout, self.correction) if weights is None else weights)
        n = float(s.mask.sum())
        metrics.mean("actor/policy_loss", float(s.zero(loss.detach()).sum()), n)
        if first and (not known or self.bypass):
            metrics = Metrics.merge([metrics, mismatch(s, now, rollout)])
        if self.kl_place == "loss":
            kl = kl_values(self.cfg.kl.estimator, s.zero(logprobs), s.zero(batch["ref_logprobs"]))
            loss = loss + self.cfg.kl.coef * kl
            metrics.mean("actor/kl_loss", float(s.zero(kl.detach()).sum()), n)
            if first and not known:
                gap = s.zero(now - batch["ref_logprobs"])
                metrics.mean("kl", float(s.mean_per_seq(gap).sum()), float((s.counts > 0).sum()))
        if entropy is not None:
            loss = loss - self.cfg.entropy_coef * s.zero(entropy)
            metrics.mean("actor/entropy", float(s.zero(entropy.detach()).sum()), n)
        return self.aggregation(loss, s, total, batch.cols.get("group_tokens")), metrics

    def summary(self, values: dict[str, float]) -> dict[str, float]:
        """A step's metrics with those that only whole-step sums can give: the effective sample size."""
        size = effective_sample_size(values)
        hidden = {"rollout/weight", "rollout/weight_square"}
        out = {name: value for name, value in values.items() if name not in hidden}
        return out if size is None else {**out, "rollout/ess": size}

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self.kl_controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_controller.load_state_dict(state["kl_controller"])
