"""Losses and what they are made of, on padded tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algos.aggregate import Aggregation, Denominators, tokens_per_prompt
from verl.algos.functional.given import above_zero, computed_in, count, tensor, together, word, zeros_and_ones
from verl.algos.functional.padded import Padded
from verl.algos.kl import check_estimator, kl_values
from verl.algos.policy_losses import POLICY_LOSSES, PolicyInputs
from verl.algos.value_loss import value_loss as value_loss_of_tokens
from verl.config.base import Component
from verl.config.loader import constants as checked


def policy_loss(
    name: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    aggregation: str = "token_mean",
    rollout_weights: Tensor | None = None,
    length: int | None = None,
    group_ids: Any = None,
    seed: int = 0,
    **constants: Any,
) -> tuple[Tensor, dict[str, float]]:
    """(scalar loss to minimise, metrics) of the whole batch given.

    logprobs [B, T]: log-probs of the drawn tokens now; they carry the gradient. old_logprobs [B, T]: before the update;
    None: the same as now (ratio exactly 1). advantages [B, T] or [B]. rollout_weights [B, T] or [B]: multiply the token
    losses, as `rollout_weights` makes them. aggregation: as in `aggregate`, with its length and group_ids. seed: of the
    random choice that clip_cov makes. constants: of the named loss (clip_low, clip_high, dual_clip, tau_pos ...); what
    is left out has the default of the configuration. metrics: clip fraction and others under the names of the trainer.
    """
    word("policy_loss: name", name)
    entry = POLICY_LOSSES[name]
    values = checked(Component(name=name, **constants), entry.config, name)
    pad = Padded.of(
        "policy_loss",
        mask,
        {"old_logprobs": old_logprobs, "rollout_weights": rollout_weights},
        logprobs=logprobs,
        advantages=advantages,
    )
    now = pad.tokens("logprobs", logprobs)
    old = now.detach() if old_logprobs is None else pad.tokens("old_logprobs", old_logprobs).detach()
    inputs = PolicyInputs(pad.segments, now, old, pad.spread("advantages", advantages).detach())
    if entry.prepare is not None:
        fixed = PolicyInputs(pad.segments, now.detach(), old, inputs.advantages)
        inputs = PolicyInputs(pad.segments, now, old, inputs.advantages, entry.prepare(fixed, values, seed))
    loss, metrics = entry.fn(inputs, values)
    if rollout_weights is not None:
        loss = loss * pad.segments.zero(pad.spread("rollout_weights", rollout_weights).detach())
    return _reduce(pad, loss, aggregation, length, group_ids), metrics.values_by_name()


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float = 0.5,
    aggregation: str = "token_mean",
    length: int | None = None,
    group_ids: Any = None,
) -> tuple[Tensor, dict[str, float]]:
    """(scalar loss, metrics) of the critic: 1/2 max((V - R)^2, (clip(V, Vold - clip, Vold + clip) - R)^2), aggregated.

    values [B, T]: of the critic now; they carry the gradient. old_values, returns [B, T]. clip: a finite number above
    0. aggregation: as in `aggregate`, with its length and group_ids.
    """
    near = above_zero("value_loss: clip", clip)
    pad = Padded.of("value_loss", mask, values=values, old_values=old_values, returns=returns)
    loss, metrics = value_loss_of_tokens(
        pad.segments,
        pad.tokens("values", values),
        pad.tokens("old_values", old_values).detach(),
        pad.tokens("returns", returns).detach(),
        near,
    )
    return _reduce(pad, loss, aggregation, length, group_ids), metrics.values_by_name()


def aggregate(values: Tensor, mask: Tensor, mode: str, *, length: int | None = None, group_ids: Any = None) -> Tensor:
    """One number of token values [B, T]; only those at mask 1 count, and nothing counted gives 0.

    The gradient that goes back is 0 where the mask is 0, but a function that made a NaN there turns that 0 into a NaN
    further up (0 * NaN). So let values come from functions that were given the mask, as `kl(..., mask=mask)`, or be
    finite everywhere.

    mode: token_mean, token_sum, seq_mean_token_sum, seq_mean_token_mean (means over sequences with a counted token),
    seq_mean_token_sum_norm (divided once more by `length`, a whole number of at least 1), prompt_mean (mean over
    prompts of the mean over all counted tokens of the prompt's rows; needs `group_ids`, one integer or string a row).
    """
    word("aggregate: mode", mode)
    pad = Padded.of("aggregate", mask, values=values)
    return _reduce(pad, pad.tokens("values", values), mode, length, group_ids)


def kl(name: str, logprobs: Tensor, ref_logprobs: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Estimate of the KL to a reference for each token, unreduced; the tensors and the result have one shape.

    name: k1, abs, k2, k3 on d = logprobs - ref_logprobs; `NAME+` has the value of NAME and the gradient of k2, which is
    that of the reverse KL on policy. The gradient flows to logprobs only.

    mask: where it is 0 both log-probs are taken as 0, so that value and gradient are 0 there, whatever stood there.
    Without it, a NaN or an infinity in the padding gives a NaN gradient, even if `aggregate` leaves that token out:
    give the mask, or log-probs that are finite everywhere.
    """
    word("kl: name", name)
    check_estimator(name)
    tensor("kl: logprobs", logprobs)
    tensor("kl: ref_logprobs", ref_logprobs)
    if mask is not None:
        zeros_and_ones("kl: mask", mask)
    others = {"ref_logprobs": ref_logprobs} if mask is None else {"ref_logprobs": ref_logprobs, "mask": mask}
    for what, x in others.items():
        together(f"kl: {what}", x, "logprobs", logprobs)
        if x.shape != logprobs.shape:
            shapes = f"{list(logprobs.shape)} and {list(x.shape)}"
            raise ValueError(f"kl: logprobs and {what} must have one shape, got {shapes}")
    dtype = computed_in(logprobs, ref_logprobs)
    now, ref = logprobs.to(dtype), ref_logprobs.detach().to(dtype)
    if mask is not None:
        now, ref = (torch.where(mask.bool(), x, torch.zeros_like(x)) for x in (now, ref))
    return kl_values(name, now, ref)


def _reduce(pad: Padded, loss: Tensor, mode: str, length: int | None, group_ids: Any) -> Tensor:
    word(f"{pad.function}: aggregation", mode)
    if length is not None:
        length = count(f"{pad.function}: length", length)
    reduce = Aggregation(mode, length)
    if mode == "prompt_mean" and group_ids is None:
        raise ValueError(f"{pad.function}: prompt_mean takes the mean over prompts; give group_ids, one id a row")
    group = pad.groups(group_ids)
    s = pad.segments
    return reduce(loss, s, Denominators.of(s, group), tokens_per_prompt(s, group))
