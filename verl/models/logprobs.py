"""Log-probs and entropies of the policy, in fp32, without keeping the [R, V] logits of a whole batch."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl.models.packed import PackedInput

_CHUNK_ELEMENTS = 2**26
"""Logits held at one time (bf16: 128 MiB)."""
_CACHED_ELEMENTS = 2**21
"""Of these worked on at one time on a CPU, in fp32 (8 MiB)."""


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

    Rows that are predicted from one state (samples that began alike) share its logits. A state's logits are computed
    once forward and, where states do not fit one chunk, once more backward.
    """
    if not 0 < temperature < float("inf"):  # NaN too
        raise ValueError(f"log-probs need a finite temperature above 0, got {temperature}")
    pred_U, state_R = torch.unique(packed.pred, return_inverse=True)
    order_R = torch.argsort(state_R, stable=True)
    states_UF = policy.features(packed).index_select(0, pred_U)
    with torch.no_grad():
        vocab = policy.logits(states_UF[:1]).shape[-1] if len(states_UF) else 1
    size = max(1, _CHUNK_ELEMENTS // vocab)

    def score(states: Tensor, state: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _LogProb.apply(policy.logits(states), state, target, temperature, entropy, sum_pi_squared)

    starts = range(0, max(len(states_UF), 1), size)
    counts = torch.bincount(state_R // size, minlength=len(starts)).tolist()
    parts = []
    for start, rows_R in zip(starts, order_R.split(counts), strict=True):
        given = states_UF[start : start + size], state_R[rows_R] - start, packed.target[rows_R]
        recompute = len(starts) > 1 and torch.is_grad_enabled()
        parts.append(checkpoint(score, *given, use_reentrant=False) if recompute else score(*given))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    logp, entropies, squares = (packed.scatter(torch.empty_like(c).index_copy(0, order_R, c)) for c in columns)
    return TokenScores(logp, entropies if entropy else None, squares if sum_pi_squared else None)


class _LogProb(torch.autograd.Function):
    """log softmax(z / temperature)[target] of each row's state, its entropy and the sum of its squares, keeping only z
    and the normaliser for the backward. U states, R rows; rows lie in the order of their states.
    """

    @staticmethod
    def forward(
        ctx: Any, z_UV: Tensor, state_R: Tensor, target_R: Tensor, temperature: float, entropy: bool, squares: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm_U = torch.empty(len(z_UV), dtype=_kind(z_UV), device=z_UV.device)
        entropy_U, squares_U = torch.zeros_like(norm_U), torch.zeros_like(norm_U)
        for some in _blocks(z_UV):
            z = _tempered(z_UV[some], temperature)
            top = z.amax(-1, keepdim=True)
            p = z.sub_(top).exp() if entropy else z.sub_(top).exp_()
            total = p.sum(-1)
            norm_U[some] = total.log() + top[:, 0]
            if entropy:  # H = log(sum) - sum(p z) / sum; where p is 0, z may be -inf
                entropy_U[some] = total.log() - z.clamp_(min=-1e30).mul_(p).sum(-1) / total
            if squares:
                squares_U[some] = p.div_(total[:, None]).square_().sum(-1)
        logp_R = z_UV[state_R, target_R].to(norm_U.dtype) / temperature - norm_U[state_R]
        ctx.save_for_backward(z_UV, state_R, target_R, norm_U, entropy_U)
        ctx.temperature, ctx.entropy = temperature, entropy
        squares_R = squares_U[state_R]
        ctx.mark_non_differentiable(squares_R)
        return logp_R, entropy_U[state_R], squares_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z_UV, state_R, target_R, norm_U, entropy_U = ctx.saved_tensors
        of_logp_U = torch.zeros_like(norm_U).index_add_(0, state_R, grads[0])[:, None]
        of_entropy_U = torch.zeros_like(norm_U).index_add_(0, state_R, grads[1])[:, None] if ctx.entropy else None
        grad_UV = torch.empty_like(z_UV)
        for some in _blocks(z_UV):
            logp = _tempered(z_UV[some], ctx.temperature).sub_(norm_U[some, None])
            # d logp[target] / dz = onehot - p;  d entropy / dz = -p (log p + entropy), 0 where p is
            if of_entropy_U is None:
                grad = logp.exp_().mul_(-of_logp_U[some])
            else:
                p = logp.exp()
                rise = logp.clamp_(min=-1e30).add_(entropy_U[some, None]).mul_(of_entropy_U[some])
                grad = p.mul_(rise.add_(of_logp_U[some]).neg_())
            first, last = torch.searchsorted(
                state_R, torch.tensor([some.start, some.stop], device=state_R.device)
            ).tolist()
            rows = slice(first, last)
            grad.index_put_((state_R[rows] - some.start, target_R[rows]), grads[0][rows], accumulate=True)
            grad_UV[some] = grad if ctx.temperature == 1 else grad.div_(ctx.temperature)
        return grad_UV, None, None, None, None, None


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
