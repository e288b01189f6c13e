"""User reward functions: found by path, or passed as they are."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from verl.core import RewardError
from verl.core.outside import describe, load_module
from verl.core.registry import suggestion
from verl.rewards.values import checked_values


@dataclass(frozen=True)
class RewardFunction:
    """`fn(prompts, responses) -> numbers` with its weight in the total. `name` is used in logs and errors."""

    name: str
    fn: Callable[[list[str], list[str]], Any]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise RewardError(
                f"reward function {self.name!r}: it is of type {type(self.fn).__name__} and cannot be called; "
                "give fn(prompts, responses)"
            )
        number = isinstance(self.weight, Real) and not isinstance(self.weight, bool)
        if not number or not math.isfinite(self.weight):
            raise RewardError(f"reward function {self.name!r}: weight={self.weight!r} must be a finite number")
        _check_arguments(self.name, self.fn)

    @classmethod
    def of(cls, fn: Callable[..., Any], weight: float = 1.0) -> RewardFunction:
        """From a function, a lambda or any callable object."""
        return cls(str(getattr(fn, "__name__", type(fn).__name__)), fn, weight)

    @classmethod
    def load(cls, path: str, weight: float = 1.0) -> RewardFunction:
        """From `FILE.py:NAME` or `package.module:NAME`."""
        where, _, name = path.rpartition(":")
        if not where or not name:
            raise RewardError(f"reward.functions: {path!r} is not FILE.py:NAME or package.module:NAME")
        module = load_module(where, f"reward.functions: {path}", RewardError)
        if not hasattr(module, name):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise RewardError(f"reward.functions: {path}: {where} has no {name!r}{suggestion(name, names)}")
        return cls(name, getattr(module, name), weight)

    def score(self, prompts: list[str], responses: list[str]) -> list[float]:
        """Unweighted values, checked. The function gets copies, so that it cannot change ours."""
        where = f"reward function {self.name!r}"
        try:
            returned = self.fn(list(prompts), list(responses))
        except (Exception, SystemExit) as e:  # outside code: it must not end the run as if all were well
            raise RewardError(f"{where}: raised {describe(e)}") from e
        return checked_values(returned, len(responses), where)


def _check_arguments(name: str, fn: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(fn):
        raise RewardError(
            f"reward function {name!r}: it is async; give a plain function (asyncio.run inside it is fine)"
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature; the call itself will tell
    try:
        signature.bind([], [])
    except TypeError as e:
        raise RewardError(
            f"reward function {name!r}: must take (prompts, responses), but its arguments are {signature}"
        ) from e
