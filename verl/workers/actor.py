"""The policy: scores its own samples and learns from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algos.aggregate import Denominators
from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.controller.dispatch import ONE_TO_ALL, THREE_D
from verl.controller.worker import register
from verl.core.batch import Batch
from verl.core.metrics import Metrics
from verl.engines.train.engine import EmbeddedTrainEngine, Outputs
from verl.models.export import export
from verl.models.logprobs import token_logprobs, token_scores
from verl.models.packed import PackedInput
from verl.models.policy import AnyPolicy, Policy, after
from verl.parallel.mesh import SINGLE, Mesh
from verl.utils.timing import timed
from verl.workers.trained import TrainedWorker
from verl.workers.update_plan import MiniBatch, UpdatePlan
from verl.workers.whole import Whole


class ActorWorker(TrainedWorker):
    """policy: the trained model; algorithm: gives its loss; total_steps: planned optimizer steps (for the schedule).
    mesh: the ranks that train it together.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        cfg: RunConfig,
        algorithm: Algorithm,
        device: str,
        total_steps: int,
        mesh: Mesh = SINGLE,
    ):
        self.policy, self.algorithm = policy, algorithm
        self.temperature = cfg.rollout.sampling.temperature
        self.wants_entropy = cfg.algorithm.entropy_coef != 0
        if cfg.update.activation_checkpointing:
            policy.recompute_layers()
        self.engine = EmbeddedTrainEngine(
            policy,
            self._forward,
            cfg.update,
            device,
            cfg.actor.optim,
            total_steps,
            share_prompt=policy.shares_prompt,
            head_params=policy.decoder.config.head_params if isinstance(policy, Policy) else 0,
            mesh=mesh,
        )
        self.offloads = cfg.update.offload_between
        self.rest()

    def _forward(self, packed: PackedInput, hidden: Tensor | None = None) -> Outputs:
        policy = after(self.policy, hidden)
        logprobs, entropy = token_logprobs(policy, packed, self.temperature, entropy=self.wants_entropy)
        return Outputs(logprobs, entropy)

    def _score(self, packed: PackedInput, hidden: Tensor | None = None) -> Outputs:
        return Outputs(token_logprobs(after(self.policy, hidden), packed, self.temperature)[0])

    def _score_with_squares(self, packed: PackedInput, hidden: Tensor | None = None) -> Outputs:
        scores = token_scores(after(self.policy, hidden), packed, self.temperature, sum_pi_squared=True)
        assert scores.sum_pi_squared is not None
        return Outputs(torch.stack([scores.logprobs, scores.sum_pi_squared], dim=1))

    @register(THREE_D, reads=("token_ids", "loss_mask", "group_id"), writes=("old_logprobs",))
    def old_logprobs(self, batch: Batch) -> Batch:
        return Batch(batch.cu_seqlens, {"old_logprobs": self.engine.infer(batch, self._score)})

    @register(THREE_D, reads=("token_ids", "loss_mask", "group_id"), writes=("old_logprobs", "sum_pi_squared"))
    def old_logprobs_and_squares(self, batch: Batch) -> Batch:
        """Both from one forward."""
        logprobs, squares = self.engine.infer(batch, self._score_with_squares, width=2).unbind(1)
        return Batch(batch.cu_seqlens, {"old_logprobs": logprobs, "sum_pi_squared": squares})

    @register(
        THREE_D,
        reads=("token_ids", "loss_mask", "group_id", "advantages", "rollout_logprobs"),
        optional=("old_logprobs", "ref_logprobs", "rollout_weights", "group_tokens"),
    )
    def update_actor(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        """One optimizer step for each mini-batch of the plan."""
        seen = [Metrics()]
        self.make_room()
        with timed(seen[0], "perf/update_actor"), self.updating():
            for number, mini in enumerate(plan.minibatches):

                def loss(out: Outputs, part: Batch, total: Denominators = mini.total, first: bool = number == 0) -> Any:
                    return self.algorithm.actor_loss(out.values, out.entropy, part, total, first)

                seen += [self.engine.forward_backward(self._prepared(batch, mini), loss), self.engine.optim_step()]
        return Metrics.merge(seen)

    def make_room(self) -> None:
        """Before an update, give back what is not needed until the next version of the weights; here nothing is."""

    def _prepared(self, batch: Batch, mini: MiniBatch) -> Batch:
        """The mini-batch; with what its loss chooses from all of it under the weights of now, where it does. Data ranks
        choose alike, each for the whole.
        """
        mine = batch.take(mini.index)
        if self.algorithm.policy_loss.prepare is None:
            return mine
        logprobs, whole = self.engine.infer(mine, self._score), Whole(mine, mini, self.engine.mesh)
        names = {"token_ids", "loss_mask", "advantages", "old_logprobs"} & mine.cols.keys()
        every = whole.batch(mine, sorted(names))
        chosen = self.algorithm.prepare(every, whole.column(logprobs), mini.seed)["chosen"]
        return mine.with_(chosen=whole.part(chosen))

    @register(ONE_TO_ALL)
    def export(self, folder: str) -> None:
        """Write the weights that generate, in Hugging Face form. All ranks gather them, the first writes."""
        gathered = self.engine.gathered()
        if self.engine.mesh.coord.dp == 0:  # its stages and tensor ranks have all of the model
            export(self.policy, folder, gathered or None)
