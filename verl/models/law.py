"""The law softmax(logits / temperature) of many states, forward and backward, in fp32 at least, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CACHED_ELEMENTS = 2**21
"""Logits worked on at one time on a CPU, in fp32 (8 MiB)."""


@dataclass(frozen=True)
class Law:
    """Per state, [U] fp32: log of the sum of exponentials, and where asked for the entropy and the sum of squares."""

    norm: Tensor
    entropy: Tensor | None
    squares: Tensor | None


def law_of(z_UV: Tensor, temperature: float, entropy: bool, squares: bool) -> Law:
    norm_U = torch.empty(len(z_UV), dtype=_kind(z_UV), device=z_UV.device)
    entropy_U, squares_U = (torch.empty_like(norm_U) if asked else None for asked in (entropy, squares))
    for some in _blocks(z_UV):
        z = _tempered(z_UV[some], temperature)
        top = z.amax(-1, keepdim=True)
        p = z.sub_(top).exp() if entropy else z.sub_(top).exp_()
        total = p.sum(-1)
        norm_U[some] = total.log() + top[:, 0]
        if entropy_U is not None:  # H = log(sum) - sum(p z) / sum; where p is 0, z may be -inf
            entropy_U[some] = total.log() - z.clamp_(min=-1e30).mul_(p).sum(-1) / total
        if squares_U is not None:
            squares_U[some] = p.div_(total[:, None]).square_().sum(-1)
    return Law(norm_U, entropy_U, squares_U)


def law_backward(
    z_UV: Tensor,
    temperature: float,
    law: Law,
    rows: tuple[Tensor, Tensor, Tensor],
    of_entropy_U: Tensor | None,
) -> Tensor:
    """Gradient of the logits.

    rows: gradients [R] of the log-probs of targets [R], in the order of their states, and where the rows of each state
    begin [U + 1]. of_entropy_U: gradient of the entropy. Logits may be part of a vocabulary, of which `law` is the
    whole law; a target that is not among them is -1.
    """
    of_R, target_R, begin = rows
    state_R = torch.repeat_interleave(torch.arange(len(z_UV), device=z_UV.device), begin.diff())
    of_logp_U = torch.zeros_like(law.norm).index_add_(0, state_R, of_R)[:, None]
    grad_UV = torch.empty_like(z_UV)
    for some in _blocks(z_UV):
        logp = _tempered(z_UV[some], temperature).sub_(law.norm[some, None])
        # d logp[target] / dz = onehot - p;  d entropy / dz = -p (log p + entropy), 0 where p is
        if of_entropy_U is None or law.entropy is None:
            grad = logp.exp_().mul_(-of_logp_U[some])
        else:
            p = logp.exp()
            rise = logp.clamp_(min=-1e30).add_(law.entropy[some, None]).mul_(of_entropy_U[some, None])
            grad = p.mul_(rise.add_(of_logp_U[some]).neg_())
        mine = slice(*begin[[some.start, some.stop]].tolist())
        target = target_R[mine]
        hot = (state_R[mine] - some.start, target.clamp(min=0))
        grad.index_put_(hot, torch.where(target < 0, 0, of_R[mine]), accumulate=True)
        grad_UV[some] = grad if temperature == 1 else grad.div_(temperature)
    return grad_UV


def _tempered(z: Tensor, temperature: float) -> Tensor:
    """A new tensor in fp32 at least, z / temperature."""
    z = z.to(_kind(z), copy=True)
    return z if temperature == 1 else z.div_(temperature)


def _kind(z: Tensor) -> torch.dtype:
    return torch.promote_types(z.dtype, torch.float32)


def _blocks(z_UV: Tensor) -> list[slice]:
    """Rows that are worked on together: on a CPU so few that they stay in its cache from one pass to the next."""
    rows, vocab = z_UV.shape
    size = max(1, _CACHED_ELEMENTS // vocab) if z_UV.device.type == "cpu" else max(1, rows)
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]
