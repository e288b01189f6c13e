"""The frozen reference policy."""

from __future__ import annotations

from torch import Tensor

from verl.config.run import RunConfig
from verl.controller.dispatch import THREE_D
from verl.controller.worker import Worker, register
from verl.core.batch import Batch
from verl.engines.train.engine import EmbeddedTrainEngine, Outputs
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput
from verl.models.policy import AnyPolicy, after
from verl.parallel.mesh import SINGLE, Mesh


class ReferenceWorker(Worker):
    """Scores with the actor's temperature, so that equal weights give equal log-probs."""

    def __init__(self, policy: AnyPolicy, cfg: RunConfig, device: str, mesh: Mesh = SINGLE):
        self.policy, self.temperature = policy, cfg.rollout.sampling.temperature
        self.engine = EmbeddedTrainEngine(
            policy, self._forward, cfg.update, device, name="ref", share_prompt=policy.shares_prompt, mesh=mesh
        )

    def _forward(self, packed: PackedInput, hidden: Tensor | None = None) -> Outputs:
        return Outputs(token_logprobs(after(self.policy, hidden), packed, self.temperature)[0])

    @register(THREE_D, reads=("token_ids", "loss_mask", "group_id"), writes=("ref_logprobs",))
    def ref_logprobs(self, batch: Batch) -> Batch:
        return Batch(batch.cu_seqlens, {"ref_logprobs": self.engine.infer(batch)})
