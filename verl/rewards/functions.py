"""User reward functions: found by path, or passed as they are."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.core import RewardError
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
        if not math.isfinite(self.weight):
            raise RewardError(f"reward function {self.name!r}: weight={self.weight} must be a finite number")
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
        module = _file_module(path, where) if where.endswith(".py") else _named_module(path, where)
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


def describe(error: BaseException) -> str:
    """`TypeError: message (FILE.py, line 3)` in one line; the place is where outside code raised it."""
    text = " ".join(str(error).split())
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f" ({Path(frame.tb_frame.f_code.co_filename).name}, line {frame.tb_lineno})" if frame is not None else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


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


def _file_module(path: str, where: str) -> ModuleType:
    file = Path(where).expanduser()
    if not file.is_file():
        raise RewardError(f"reward.functions: {path}: no such file {where}")
    name = f"verl_reward_{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # a script that exits at its end, too
        del sys.modules[name]
        raise RewardError(f"reward.functions: {path}: importing {where} raised {describe(e)}") from e
    return module


def _named_module(path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name is not None and (where == e.name or where.startswith(f"{e.name}.")):
            raise RewardError(
                f"reward.functions: {path}: no module {e.name!r}; install it, or give FILE.py:NAME"
            ) from e
        raise RewardError(f"reward.functions: {path}: importing {where} raised {describe(e)}") from e
    except (Exception, SystemExit) as e:
        raise RewardError(f"reward.functions: {path}: importing {where} raised {describe(e)}") from e
