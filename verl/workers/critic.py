"""The value model: says what each state is worth, and learns it."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algos.aggregate import Aggregation
from verl.algos.segments import Segments
from verl.algos.value_loss import value_loss
from verl.config.run import RunConfig
from verl.controller.dispatch import THREE_D
from verl.controller.worker import register
from verl.core.batch import Batch
from verl.core.metrics import Metrics
from verl.engines.train.engine import EmbeddedTrainEngine, Outputs
from verl.models.packed import PackedInput
from verl.models.value import ValueModel
from verl.parallel.mesh import SINGLE, Mesh
from verl.utils.timing import timed
from verl.workers.trained import TrainedWorker
from verl.workers.update_plan import MiniBatch, UpdatePlan


class CriticWorker(TrainedWorker):
    """model: decoder with a value head; total_steps: planned optimizer steps; mesh: ranks that train it together."""

    def __init__(self, model: ValueModel, cfg: RunConfig, device: str, total_steps: int, mesh: Mesh = SINGLE):
        self.model, self.clip = model, cfg.critic.value_clip
        if cfg.update.activation_checkpointing:
            model.recompute_layers()
        self.engine = EmbeddedTrainEngine(
            model,
            self._forward,
            cfg.update,
            device,
            cfg.critic.optim,
            total_steps,
            "critic",
            model.shares_prompt,
            mesh=mesh,
        )
        self.offloads = cfg.update.offload_between
        self.rest()

    def _forward(self, packed: PackedInput, hidden: Tensor | None = None) -> Outputs:
        return Outputs(self.model.values(packed, hidden))

    @register(THREE_D, reads=("token_ids", "loss_mask", "group_id"), writes=("values",))
    def values(self, batch: Batch) -> Batch:
        return Batch(batch.cu_seqlens, {"values": self.engine.infer(batch)})

    @register(THREE_D, reads=("token_ids", "loss_mask", "group_id", "values", "returns"))
    def update_critic(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        """One optimizer step for each mini-batch of the plan; token mean."""
        seen = [Metrics()]
        with timed(seen[0], "perf/update_critic"), self.updating():
            for mini in plan.minibatches:
                seen += [self._backward(batch, mini), self.engine.optim_step()]
        return Metrics.merge(seen)

    def _backward(self, batch: Batch, mini: MiniBatch) -> Metrics:
        def loss(out: Outputs, part: Batch) -> tuple[torch.Tensor, Metrics]:
            s = Segments.of(part.cu_seqlens, part["loss_mask"])
            per_token, metrics = value_loss(s, out.values, part["values"], part["returns"], self.clip)
            return Aggregation("token_mean")(per_token, s, mini.total), metrics

        return self.engine.forward_backward(batch.take(mini.index), loss)


def explained(batch: Batch) -> Metrics:
    """Share of the returns' variance that the values explain: 1 is a perfect critic, 0 one that knows only the mean."""
    mask = batch["loss_mask"]
    target, value = batch["returns"][mask], batch["values"][mask]
    if len(target) < 2 or float(target.var()) == 0.0:
        return Metrics()
    return Metrics().mean("critic/explained_variance", float(1 - (target - value).var() / target.var()), 1.0)
