"""The train engine of one process: forward, backward and optimizer of one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.algorithm import UpdateConfig
from verl.config.models import OptimConfig
from verl.core.batch import Batch
from verl.core.metrics import Metrics
from verl.core.protocols import Place
from verl.engines.train.micro_batches import split, tokens_at_once
from verl.engines.train.optimizer import MasterAdamW
from verl.models.packed import PackedInput
from verl.utils.flops import model_flops


@dataclass(frozen=True)
class Outputs:
    """What the model says of each token of a batch, [T], 0 where loss_mask is 0. entropy: [T], only where asked.

    values may be [T, K] for a forward that `infer` is given with width K.
    """

    values: Tensor
    entropy: Tensor | None = None


Forward = Callable[[PackedInput], Outputs]
Reduce = Callable[[list[Tensor]], None]
ScalarLoss = Callable[[Outputs, Batch], tuple[Tensor, Metrics]]
"""(outputs, micro-batch) -> (its share of the mini-batch's loss, metrics)."""


class EmbeddedTrainEngine:
    """One model in one process. `forward` turns packed tokens into the column that this model is asked for.

    Without an optimizer config the engine is frozen: it infers only. head_params: weights of the output product, which
    only scored rows go through (they count in the reported FLOPs). reduce: adds the fp32 gradients of all replicas, in
    place, before the norm is taken (losses divide by counts of all replicas, so the sum is right, not the mean); every
    replica calls it once a step, however many micro-batches it had. reports: whether this replica tells what all know.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        update: UpdateConfig,
        device: str,
        optim: OptimConfig | None = None,
        total_steps: int = 1,
        name: str = "actor",
        share_prompt: bool = True,
        head_params: int = 0,
        reduce: Reduce | None = None,
        reports: bool = True,
    ):
        self.module, self.forward, self.device, self.name = module, forward, device, name
        self.max_tokens = tokens_at_once(update, device)
        self.share_prompt = update.share_prompt and share_prompt
        module.requires_grad_(optim is not None)
        self.optimizer = MasterAdamW(module, optim, total_steps) if optim is not None else None
        self.skipped_steps = 0
        self.reduce, self.reports = reduce, reports
        self.head_params = head_params
        self.body_params = sum(p.numel() for name, p in module.named_parameters() if p.ndim >= 2 and not _is_end(name))

    def _split(self, batch: Batch) -> list[list[int]]:
        return split(batch, self.max_tokens, self.share_prompt)

    @torch.no_grad()
    def infer(self, batch: Batch, forward: Forward | None = None, width: int | None = None) -> Tensor:
        """[T] float32 on the host: the model's column for every token; no gradient.

        forward: in place of the engine's own; the answer is [T, width] where it says several things of a token.
        """
        places = batch.per_seq(torch.arange(batch.num_tokens))
        out = torch.zeros(batch.num_tokens, *(() if width is None else (width,)))
        for index in self._split(batch):
            packed = PackedInput.of(batch.take(index), self.share_prompt, self.device)
            values = (forward or self.forward)(packed).values
            out[torch.cat([places[i] for i in index])] = values.float().cpu()
        return out

    def forward_backward(self, batch: Batch, loss: ScalarLoss) -> Metrics:
        """Add the gradients of one mini-batch, part by part. The sum of parts is the mini-batch, however it is cut."""
        metrics = []
        for index in self._split(batch):
            part = batch.take(index)
            packed = PackedInput.of(part, self.share_prompt, self.device)
            share, seen = loss(self.forward(packed), part.to(self.device))
            # Numbers are read before backward, so that the next part is packed while a GPU still works on this one.
            seen.sum(f"{self.name}/loss", float(share.detach()))
            if share.requires_grad:
                share.backward()
            tokens, rows = len(packed.token_ids), len(packed.where)
            flops = model_flops(self.body_params, tokens, backward=True)
            flops += model_flops(self.head_params, rows, backward=True)
            metrics.append(seen.sum(f"{self.name}/tokens", tokens).sum(f"{self.name}/flops", flops))
        return Metrics.merge(metrics)

    def optim_step(self) -> Metrics:
        """Clip to the norm, step, zero. A norm that is not finite never reaches the weights: counted and skipped."""
        assert self.optimizer is not None
        if self.reduce is not None:
            self.reduce(self.optimizer.grads)
        norm = self.optimizer.grad_norm()
        metrics = Metrics()
        finite = math.isfinite(norm)
        if finite:
            metrics.mean(f"{self.name}/grad_norm", norm, 1.0).mean(f"{self.name}/lr", self.optimizer.lr, 1.0)
            self.optimizer.step(min(1.0, self.optimizer.cfg.max_grad_norm / (norm + 1e-6)))
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad()
        metrics.sum(f"{self.name}/skipped_steps", 0.0 if finite else 1.0)
        return metrics if self.reports else Metrics()

    def shards(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def place(self, where: Place) -> None:
        """Training state of the embedded engine stays where it is: there is nobody to give the memory to."""
        if where != "device":
            raise ValueError(f"the embedded train engine cannot be placed on {where!r}")

    def state_dict(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {}
        return {"optimizer": self.optimizer.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.optimizer is not None
        self.optimizer.load_state_dict(state["optimizer"])
        self.skipped_steps = int(state["skipped_steps"])


def _is_end(name: str) -> bool:
    """Whether a parameter is an embedding or an output head: looked up, or applied to scored rows only."""
    return "embed" in name or name.startswith(("lm_head.", "score."))
