"""Five steps of AdamW on three micro-batches of different lengths, on one process or on any cut of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from tests.models.helpers import family_batch, ragged_batch
from tests.parallel.models import Model
from verl.config.models import ModelConfig
from verl.engines.train.holding import Holding
from verl.models.gather import whole_tensors
from verl.models.load import native_policy
from verl.models.logprobs import token_scores
from verl.models.packed import PackedInput
from verl.models.policy import Policy, after, hidden_states
from verl.parallel.axes import PipelineParallel, TensorParallel
from verl.parallel.pipeline import Pipeline

STEPS = 5


@dataclass
class Seen:
    """columns: of each micro-batch before any step, [3, T]: log-probs, entropies, sums of squares. Whole tensors by
    name are on the first process only.
    """

    losses: list[float] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)


def batches() -> list[PackedInput]:
    return [PackedInput.of(b, True) for b in (ragged_batch(0), family_batch(1), ragged_batch(2))]


def trained(
    model: Model,
    tp: TensorParallel | None = None,
    pp: PipelineParallel | None = None,
    *,
    fp32_head: bool = False,
    recompute: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Seen:
    cfg = ModelConfig(dtype="float32", implementation="native", fp32_head=fp32_head)
    policy = native_policy(model.source, model.config, cfg, tp=tp, pp=pp).to(dtype)
    if recompute:
        policy.recompute_layers()
    adam = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)
    seen, packed = Seen(), batches()
    weights = [torch.randn(p.num_tokens, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(packed)]
    for step in range(STEPS):

        def forward(i: int, hidden: Tensor | None, step: int = step) -> Tensor:
            if not policy.decoder.stage.last:
                return hidden_states(policy.decoder, packed[i], hidden)
            of = after(policy, hidden)
            scores = token_scores(of, packed[i], 0.7, entropy=True, sum_pi_squared=True)
            assert scores.entropy is not None and scores.sum_pi_squared is not None
            if step == 0:
                seen.columns.append(torch.stack([scores.logprobs, scores.entropy, scores.sum_pi_squared]).detach())
            loss = (scores.logprobs * weights[i]).sum() + 0.1 * scores.entropy.sum()
            return loss / 100

        seen.losses.append(sum(map(float, _gradients(policy, pp, packed, forward))))
        if pp is not None and model.config.tied and policy.decoder.stage.embeds(tied=True):
            Pipeline(pp, dtype, "cpu").sum_ends(policy.decoder.embed_tokens.weight.grad)
        if step == 0:
            grads = {name: p.grad.clone() for name, p in policy.named_parameters()}
            seen.grads, seen.norm = whole_tensors(policy, grads), _norm(policy, grads)
        adam.step()
        adam.zero_grad()
    seen.weights = whole_tensors(policy, dict(policy.named_parameters()))
    return seen


def _gradients(policy: Policy, pp: PipelineParallel | None, packed: list[PackedInput], forward) -> list[Tensor]:
    if pp is not None:
        shapes = [(len(p.token_ids), policy.decoder.config.hidden_size) for p in packed]
        return Pipeline(pp, next(policy.parameters()).dtype, "cpu").forward_backward(shapes, forward)
    losses = []
    for i in range(len(packed)):
        losses.append(forward(i, None))
        losses[-1].backward()
    return losses


def _norm(policy: Policy, grads: dict[str, Tensor]) -> float:
    """The norm of all gradients, by what each process owns."""
    holding = Holding.of(policy)
    total = torch.stack([grad[holding.own(name, grad)].square().sum() for name, grad in grads.items()]).sum()
    for axis in (policy.decoder.tp, policy.decoder.pp):
        if axis is not None:
            dist.all_reduce(total, group=axis.group)
    return sqrt(float(total))
