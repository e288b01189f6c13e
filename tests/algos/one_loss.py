"""One policy loss on small inputs: what the tests of losses call."""

import math
from typing import Any

import torch
from torch import Tensor

from verl.algos.policy_losses import POLICY_LOSSES, PolicyInputs
from verl.algos.segments import Segments
from verl.config.base import Component
from verl.config.loader import constants
from verl.core.metrics import Metrics

WITH_RATIO = sorted(e.name for e in POLICY_LOSSES if "old_logprobs" in e.needs)


def config(name: str, **given: Any) -> Any:
    return constants(Component(name=name, **given), POLICY_LOSSES[name].config, name)


def loss_of(name: str, x: PolicyInputs, seed: int = 0, **given: Any) -> tuple[Tensor, Metrics, Tensor | None]:
    """(token losses, metrics, what was chosen)."""
    entry, c = POLICY_LOSSES[name], config(name, **given)
    chosen = None
    if entry.prepare is not None:
        chosen = entry.prepare(PolicyInputs(x.segments, x.logprobs.detach(), x.old_logprobs, x.advantages), c, seed)
    loss, metrics = entry.fn(PolicyInputs(x.segments, x.logprobs, x.old_logprobs, x.advantages, chosen), c)
    return loss, metrics, chosen


def row(now: list[float], old: list[float], adv: list[float], seqs: int = 1) -> PolicyInputs:
    """Sequences of equal length, every token counted; `now` is a leaf."""
    n = len(now)
    s = Segments.of(torch.arange(seqs + 1) * (n // seqs), torch.ones(n, dtype=torch.bool))
    new, old_t, a = (torch.tensor(v, dtype=torch.float64) for v in (now, old, adv))
    return PolicyInputs(s, new.requires_grad_(), old_t, a)


def slope(name: str, x: PolicyInputs, **given: Any) -> list[float]:
    loss, _, _ = loss_of(name, x, **given)
    return torch.autograd.grad(loss.sum(), x.logprobs)[0].tolist()


def move(ratio: float, advantage: float, before: float = 0.2) -> PolicyInputs:
    """One token of probability `before` whose ratio is now `ratio`."""
    return row([math.log(before * ratio)], [math.log(before)], [advantage])
