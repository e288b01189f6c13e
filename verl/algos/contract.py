"""What a registered function must keep to. Ours do; one of a user's is told in a line what it broke."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from verl.algos.advantages import CreditInputs
from verl.algos.segments import Segments
from verl.core.errors import ConfigError
from verl.core.metrics import Metrics
from verl.core.registry import Entry, suggestion


def check_entry(at: str, entry: Entry[Callable[..., Any]], columns: Sequence[str]) -> None:
    """ConfigError where `needs` names a column that such a function cannot be given, or `config` is no section."""
    for column in entry.needs:
        if column not in columns:
            raise ConfigError(
                f"{at}: {entry.name!r} is registered with needs={column!r}{suggestion(column, list(columns))}, which "
                f"it cannot be given; it can need {', '.join(columns)}"
            )
    if entry.config is not None and not (isinstance(entry.config, type) and issubclass(entry.config, BaseModel)):
        raise ConfigError(
            f"{at}: {entry.name!r} is registered with config={entry.config!r}; give a subclass of verl.config.Section"
        )


def two(returned: Any, kind: str, name: str) -> tuple[Any, Any]:
    """The pair that a registered function returns."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        want = "(advantages, returns or None)" if kind == "advantage" else "(token losses, Metrics)"
        raise ConfigError(f"algorithm.{kind}: {name!r} must return {want}, it returned a {type(returned).__name__}")
    return returned


def check_credit(name: str, given: CreditInputs, advantages: Any, returns: Any) -> None:
    """Advantages (and returns) are float tensors [T], and finite where what was given is: a diverged model is no fault
    of the estimator, and its update is skipped further on.
    """
    s = given.segments
    for what, x in (("advantages", advantages), ("returns", returns)):
        if what == "returns" and x is None:
            continue
        _check_tokens("advantage", name, what, x, s.seq)
        if not _finite(x, s) and all(_finite(c, s) for c in (given.rewards, given.values, given.old_logprobs)):
            raise ConfigError(f"algorithm.advantage: {name!r} gave {what} that are not finite from inputs that are")


def _finite(x: Tensor | None, s: Segments) -> bool:
    return x is None or bool(torch.isfinite(x[s.mask]).all())


def check_loss(name: str, loss: Any, logprobs: Tensor, metrics: Any) -> None:
    """Token losses [T], with a gradient where the log-probs have one; metrics as partials."""
    _check_tokens("policy_loss", name, "losses", loss, logprobs)
    if logprobs.requires_grad and not loss.requires_grad:
        raise ConfigError(f"algorithm.policy_loss: {name!r} gave losses without a gradient; use x.logprobs undetached")
    if not isinstance(metrics, Metrics):
        raise ConfigError(
            f"algorithm.policy_loss: {name!r} must return verl.core.metrics.Metrics beside the losses (Metrics() for "
            f"none), it returned a {type(metrics).__name__}"
        )


def _check_tokens(kind: str, name: str, what: str, x: Any, like: Tensor) -> None:
    if not isinstance(x, Tensor) or x.shape != like.shape or not x.is_floating_point():
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ConfigError(
            f"algorithm.{kind}: {name!r} must give {what} as a float tensor of one number a token {tuple(like.shape)}, "
            f"it gave {got}"
        )
