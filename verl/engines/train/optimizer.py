"""AdamW on fp32 master weights, with gradients summed in fp32 whatever dtype the model computes in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from verl.config.models import OptimConfig
from verl.engines.train.holding import Holding
from verl.engines.train.schedule import lr_at
from verl.parallel.mesh import SINGLE, Mesh
from verl.parallel.norm import global_norm
from verl.parallel.parts import is_cut, part

_MOMENTS = ("exp_avg", "exp_avg_sq")
_PIECE = 2**19
"""Elements of a gradient that are added at one time."""


class MasterAdamW:
    """Decoupled weight decay (arXiv:1711.05101, algorithm 2).

    A parameter below fp32 gets an fp32 master; its gradient is added to the master's fp32 gradient as soon as backward
    has made it, and then freed, so micro-batches lose nothing to rounding. fp32 parameters are their own masters. Of a
    parameter that is cut over ranks, this rank's part is the master, in the same storage; FSDP adds to its gradient.
    Gradient buffers stay allocated between steps, unless `free_grads` is called.
    """

    def __init__(self, module: nn.Module, cfg: OptimConfig, total_steps: int):
        self.cfg, self.total_steps = cfg, total_steps
        self.steps = 0
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        params = dict(module.named_parameters())
        self.params = [params[name] for name in self.names]
        self.masters = [_master(p) for p in self.params]
        for p, master in zip(self.params, self.masters, strict=True):
            if master is not p and not is_cut(p):
                p.register_post_accumulate_grad_hook(_into(master))
        self.take_grads()
        filled = [(m, p) for m, p in zip(self.masters, self.params, strict=True) if m.numel()]
        decay, rest = [m for m, p in filled if p.ndim >= 2], [m for m, p in filled if p.ndim < 2]
        groups = [{"params": kept, "weight_decay": wd} for kept, wd in ((decay, cfg.weight_decay), (rest, 0.0)) if kept]
        self._adam = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)

    @property
    def grads(self) -> list[Tensor]:
        """fp32, in the order of `names`: this rank's parts."""
        return [m.grad for m in self.masters if m.grad is not None]

    @property
    def moments(self) -> list[Tensor]:
        """What AdamW keeps beside the masters, as far as steps were made."""
        return [s[key] for s in self._adam.state.values() for key in _MOMENTS]

    @property
    def lr(self) -> float:
        """Rate of the next step."""
        return lr_at(self.steps, self.cfg, self.total_steps)

    def grad_norm(self, mesh: Mesh = SINGLE, holding: Holding | None = None) -> float:
        """Global 2-norm; nan or inf if any gradient is. holding: which elements count on this rank; None: all."""
        grads = self.grads
        if holding is None or mesh.axes is None:
            return global_norm(grads, grads, mesh)
        owned = [g[holding.own(n, p)] for g, n, p in zip(grads, self.names, self.params, strict=True)]
        return global_norm(grads, owned, mesh)

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
        pairs = [(p.data, m) for p, m in zip(self.params, self.masters, strict=True) if m is not p and not is_cut(p)]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    @torch.no_grad()
    def zero_grad(self) -> None:
        torch._foreach_zero_(self.grads)

    @torch.no_grad()
    def take_grads(self) -> None:
        """Gradient buffers, zero."""
        for p, master in zip(self.params, self.masters, strict=True):
            if is_cut(p):
                p.grad = torch.zeros_like(p)
                master.grad = part(p.grad)
            else:
                master.grad = torch.zeros_like(master)

    def free_grads(self) -> None:
        """Give the gradient buffers' memory back; `take_grads` before the next backward."""
        for x in (*self.params, *self.masters):
            x.grad = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> None:
        """Masters and moments to where `move` copies a tensor. Masters that are the model's weights are where those
        are: moved already, or staying. No gradients are held.
        """
        for p, master in zip(self.params, self.masters, strict=True):
            if is_cut(p):
                master.data = part(p)
            elif master is not p:
                master.data = move(master.data)
            state = self._adam.state.get(master, {})
            state.update({key: move(value) for key, value in state.items()})

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What the next step depends on beside `steps`, by kind and parameter name: masters, and moments once a step
        was made. This rank's parts, as they lie.
        """
        kinds = {"master": {n: m.detach() for n, m in self._named()}}
        for key in _MOMENTS if self.steps else ():
            kinds[key] = {n: self._adam.state[m][key] if m.numel() else m.detach() for n, m in self._named()}
        return kinds

    def restart(self, steps: int) -> None:
        """As after `steps` steps, with moments of zero, for `state` to be filled; call `sync` when it is."""
        self.steps = steps
        self._adam.state.clear()
        for _, master in self._named():
            if steps and master.numel():
                moments = {key: torch.zeros_like(master.detach()) for key in _MOMENTS}
                self._adam.state[master] = {"step": torch.tensor(float(steps), device=master.device), **moments}

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        return zip(self.names, self.masters, strict=True)


def _master(p: nn.Parameter) -> Tensor:
    """The fp32 tensor that is trained for p: p itself, its part here, or a copy."""
    if is_cut(p):
        return part(p).detach()
    return p if p.dtype == torch.float32 else p.detach().float()


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
