"""AdamW on fp32 master weights, with gradients summed in fp32 whatever dtype the model computes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.models import OptimConfig
from verl.core.errors import CheckpointError
from verl.engines.train.schedule import lr_at

_PIECE = 2**19
"""Elements of a gradient that are added at one time."""


class MasterAdamW:
    """Decoupled weight decay (arXiv:1711.05101, algorithm 2).

    A parameter below fp32 gets an fp32 master; its gradient is added to the master's fp32 gradient as soon as backward
    has made it, and then freed, so micro-batches lose nothing to rounding. fp32 parameters are their own masters.
    Gradient buffers stay allocated between steps.
    """

    def __init__(self, module: nn.Module, cfg: OptimConfig, total_steps: int):
        self.cfg, self.total_steps = cfg, total_steps
        self.steps = 0
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        params = dict(module.named_parameters())
        self.params = [params[name] for name in self.names]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            if master is not p:
                p.register_post_accumulate_grad_hook(_into(master))
        decay = [m for m, p in zip(self.masters, self.params, strict=True) if p.ndim >= 2]
        rest = [m for m, p in zip(self.masters, self.params, strict=True) if p.ndim < 2]
        groups = [{"params": kept, "weight_decay": wd} for kept, wd in ((decay, cfg.weight_decay), (rest, 0.0)) if kept]
        self._adam = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)

    @property
    def grads(self) -> list[Tensor]:
        return [m.grad for m in self.masters if m.grad is not None]

    @property
    def lr(self) -> float:
        """Rate of the next step."""
        return lr_at(self.steps, self.cfg, self.total_steps)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Global 2-norm; nan or inf if any gradient is."""
        return float(torch.stack(torch._foreach_norm(self.grads)).norm())

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with gradients times `scale`; then the model's weights are the masters', rounded."""
        if scale != 1.0:
            torch._foreach_mul_(self.grads, scale)
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        self.steps += 1
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Copy masters into the weights that compute."""
        pairs = [(p.data, m) for p, m in zip(self.params, self.masters, strict=True) if m is not p]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    @torch.no_grad()
    def zero_grad(self) -> None:
        torch._foreach_zero_(self.grads)

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments by parameter name, and the step count."""
        moments = [self._adam.state.get(m, {}) for m in self.masters]
        state: dict[str, Any] = {"steps": self.steps, "master": dict(zip(self.names, self.masters, strict=True))}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = {n: s[key] for n, s in zip(self.names, moments, strict=True) if key in s}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["master"]
        if set(saved) != set(self.names):
            odd = sorted(set(saved) ^ set(self.names))[:3]
            raise CheckpointError(f"the checkpoint holds other weights than the model (for example {', '.join(odd)})")
        self.steps = int(state["steps"])
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(saved[name])
            if self.steps:
                self._adam.state[master] = {
                    "step": torch.tensor(float(self.steps), device=master.device),
                    "exp_avg": state["exp_avg"][name].to(master.device, copy=True),
                    "exp_avg_sq": state["exp_avg_sq"][name].to(master.device, copy=True),
                }
        self.sync()


def _into(master: Tensor) -> Any:
    @torch.no_grad()
    def add(p: Tensor) -> None:
        assert master.grad is not None and p.grad is not None
        if master.grad.is_contiguous() and p.grad.is_contiguous():
            # Torch makes an fp32 copy of the bf16 side first; that of a piece stays in the cache.
            for some, new in zip(master.grad.view(-1).split(_PIECE), p.grad.view(-1).split(_PIECE), strict=True):
                some.add_(new)
        else:
            master.grad.add_(p.grad)
        p.grad = None

    return add
