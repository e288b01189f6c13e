"""Log-probs and entropies of the policy, in fp32, without keeping the [R, V] logits of a whole batch."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl.models.packed import PackedInput

_CHUNK_ELEMENTS = 2**25
"""Logits held at one time (fp32: 128 MiB)."""


class ScoresTokens(Protocol):
    """What a policy offers here; `Policy` and `TransformersPolicy` are two."""

    def features(self, packed: PackedInput) -> Tensor: ...

    def logits(self, features: Tensor) -> Tensor: ...


class TokenScores(NamedTuple):
    """Of the law softmax(logits / temperature), [T] fp32, 0 where not a row; None where not asked for.

    sum_pi_squared: sum over the vocabulary of squared probabilities; it carries no gradient.
    """

    logprobs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None


def token_logprobs(
    policy: ScoresTokens, packed: PackedInput, temperature: float, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(log-probs [T] fp32, entropies [T] fp32 or None): what `token_scores` says, without sum_pi_squared."""
    return token_scores(policy, packed, temperature, entropy=entropy)[:2]


def token_scores(
    policy: ScoresTokens,
    packed: PackedInput,
    temperature: float,
    *,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> TokenScores:
    """Log-probs of every row's token, and what else is asked for.

    Each row's logits are computed once forward and, where rows do not fit one chunk, once more backward.
    """
    if temperature <= 0:
        raise ValueError(f"log-probs need a temperature above 0, got {temperature}")
    rows_RF = policy.features(packed).index_select(0, packed.pred)
    with torch.no_grad():
        vocab = policy.logits(rows_RF[:1]).shape[-1] if len(rows_RF) else 1
    size = max(1, _CHUNK_ELEMENTS // vocab)

    def score(rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _LogProb.apply(policy.logits(rows), target, temperature, entropy, sum_pi_squared)

    parts = []
    for rows, target in zip(rows_RF.split(size), packed.target.split(size), strict=True):
        recompute = len(rows_RF) > size and torch.is_grad_enabled()
        parts.append(checkpoint(score, rows, target, use_reentrant=False) if recompute else score(rows, target))
    logp_R, entropy_R, squares_R = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenScores(
        packed.scatter(logp_R),
        packed.scatter(entropy_R) if entropy else None,
        packed.scatter(squares_R) if sum_pi_squared else None,
    )


class _LogProb(torch.autograd.Function):
    """log softmax(z / temperature)[target], its entropy and the sum of its squares, keeping only z and the normaliser
    for the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, z_RV: Tensor, target_R: Tensor, temperature: float, entropy: bool, squares: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = z_RV.float() / temperature
        norm_R = torch.logsumexp(z, dim=-1)
        logp_R = z.gather(1, target_R[:, None]).squeeze(1) - norm_R
        entropy_R = torch.zeros_like(logp_R)
        if entropy:
            entropy_R = torch.special.entr(torch.softmax(z, dim=-1)).sum(-1)
        squares_R = torch.zeros_like(logp_R)
        if squares:
            squares_R = (torch.logsumexp(2 * z, dim=-1) - 2 * norm_R).exp()
        ctx.save_for_backward(z_RV, target_R, norm_R, entropy_R)
        ctx.temperature, ctx.entropy = temperature, entropy
        ctx.mark_non_differentiable(squares_R)
        return logp_R, entropy_R, squares_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z_RV, target_R, norm_R, entropy_R = ctx.saved_tensors
        logp = (z_RV.float() / ctx.temperature).sub_(norm_R[:, None]).clamp_(min=-1e30)  # -inf logits: 0 * log 0 = 0
        p = logp.exp()
        # d logp[target] / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
        scale = -grads[0][:, None]
        if ctx.entropy:
            scale = scale - grads[1][:, None] * (logp + entropy_R[:, None])
        grad = p.mul_(scale)
        grad.scatter_add_(1, target_R[:, None], grads[0][:, None])
        return grad.div_(ctx.temperature).to(z_RV.dtype), None, None, None, None
