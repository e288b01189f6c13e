"""SAPO: a sigmoid of the ratio in place of the clip."""

from __future__ import annotations

import torch
from pydantic import Field

from verl.algos.policy_losses.inputs import POLICY_LOSSES, PolicyInputs, PolicyLoss, log_ratio
from verl.algos.policy_losses.report import ratio_metrics
from verl.config.base import Section


class SAPO(Section):
    """Constants of sapo."""

    tau_pos: float = Field(1.0, gt=0)
    """Temperature where A > 0: the higher, the faster the gradient fades away from ratio 1."""
    tau_neg: float = Field(1.05, gt=0)
    """Temperature elsewhere; a little higher, as pushing tokens down is what destabilises."""


@POLICY_LOSSES.register("sapo", needs=("old_logprobs",), config=SAPO)
def sapo(x: PolicyInputs, c: SAPO) -> PolicyLoss:
    """-A sigmoid(tau (rho - 1)) 4 / tau, tau = tau_pos if A > 0 else tau_neg (arXiv:2511.20347, section 3).

    4 / tau makes the gradient at ratio 1 that of REINFORCE.
    """
    advantage = x.segments.zero(x.advantages)
    tau = torch.where(advantage > 0, torch.full_like(advantage, c.tau_pos), torch.full_like(advantage, c.tau_neg))
    gate = torch.sigmoid(tau * (log_ratio(x).exp() - 1.0)) * (4.0 / tau)
    return -advantage * gate, ratio_metrics(x)
