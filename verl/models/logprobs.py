"""Log-probs and entropies of the policy, in fp32, without keeping the [R, V] logits of a whole batch."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl.models.kernels import Kernels
from verl.models.law import Law, law_backward, law_of
from verl.models.packed import PackedInput
from verl.models.vocabulary import Vocabulary

_CHUNK_ELEMENTS = 2**26
"""Logits held at one time (bf16: 128 MiB)."""


class ScoresTokens(Protocol):
    """What a policy offers here; `Policy` and `TransformersPolicy` are two."""

    @property
    def kernels(self) -> Kernels | None: ...

    @property
    def vocabulary(self) -> Vocabulary | None: ...

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
    once forward and, where states do not fit one chunk, once more backward. Where the policy has a part of the
    vocabulary only, every rank of its axis calls this with the same rows, and gets the same scores.
    """
    if not 0 < temperature < float("inf"):  # NaN too
        raise ValueError(f"log-probs need a finite temperature above 0, got {temperature}")
    pred_U, state_R = torch.unique(packed.pred, return_inverse=True)
    order_R = torch.argsort(state_R, stable=True)
    states_UF = policy.features(packed).index_select(0, pred_U)
    size = max(1, _CHUNK_ELEMENTS // _width(policy, states_UF))

    def score(states: Tensor, state: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        asked = (entropy, sum_pi_squared)
        logits = policy.logits(states)
        return _LogProb.apply(logits, state, target, temperature, asked, policy.kernels, policy.vocabulary)

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


@torch.no_grad()
def _width(policy: ScoresTokens, states_UF: Tensor) -> int:
    """Logits of a state that are held here; the same on all ranks, as it says how often they meet."""
    if policy.vocabulary is not None:
        return policy.vocabulary.width
    return policy.logits(states_UF[:1]).shape[-1] if len(states_UF) else 1


class _LogProb(torch.autograd.Function):
    """log softmax(z / temperature)[target] of each row's state, its entropy and the sum of its squares, keeping only z
    and the law's numbers for the backward. U states, R rows; rows lie in the order of their states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z_UV: Tensor,
        state_R: Tensor,
        target_R: Tensor,
        temperature: float,
        asked: tuple[bool, bool],
        kernels: Kernels | None,
        vocabulary: Vocabulary | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernels = kernels if kernels is not None and kernels.takes(z_UV) else None
        law = kernels.law(z_UV, temperature, *asked) if kernels is not None else law_of(z_UV, temperature, *asked)
        if vocabulary is None:
            logit_R = z_UV[state_R, target_R].to(law.norm.dtype)
        else:
            target_R = vocabulary.own(target_R)
            own_R = z_UV[state_R, target_R.clamp(min=0)].to(law.norm.dtype)
            law, logit_R = vocabulary.whole(law, torch.where(target_R < 0, 0, own_R))
        logp_R = logit_R / temperature - law.norm[state_R]
        ctx.save_for_backward(z_UV, state_R, target_R, law.norm, law.entropy)
        ctx.temperature, ctx.kernels = temperature, kernels
        more = (law.entropy, law.squares)
        entropy_R, squares_R = (torch.zeros_like(logp_R) if x is None else x[state_R] for x in more)
        ctx.mark_non_differentiable(squares_R)
        return logp_R, entropy_R, squares_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z_UV, state_R, target_R, norm_U, entropy_U = ctx.saved_tensors
        of_entropy_U = None if entropy_U is None else torch.zeros_like(norm_U).index_add_(0, state_R, grads[1])
        begin = torch.searchsorted(state_R, torch.arange(len(z_UV) + 1, device=state_R.device))
        backward = law_backward if ctx.kernels is None else ctx.kernels.law_backward
        rows = (grads[0].contiguous(), target_R, begin)
        grad_UV = backward(z_UV, ctx.temperature, Law(norm_U, entropy_U, None), rows, of_entropy_U)
        return grad_UV, None, None, None, None, None, None
