"""Generated tasks with their own verifier: the one file that imports `reasoning_gym`."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import yaml

from verl.core import DataError, MissingDependency
from verl.core.registry import suggestion
from verl.core.rng import derive_seed
from verl.data.rows import Row, Rows, one_line

PREFIX = "reasoning_gym:"
DEFAULT_SIZE = 2000
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
RESERVED = {"size": "data.size", "seed": "trainer.seed"}


@dataclass(frozen=True)
class GymAnswer:
    """One generated entry; as a prompt's reference it scores responses itself, in any process.

    task, params: what the task was made with (its scorer may read them).
    entry: the generator's own record: `question`, `answer`, `metadata`.
    """

    task: str
    params: str
    entry: Mapping[str, Any]

    @property
    def answer(self) -> str:
        return str(self.entry["answer"])

    def score(self, response: str) -> float:
        """The task's own score, 0 to 1, of the text in the last `<answer>` tag, or else of the whole response."""
        tagged = ANSWER_TAG.findall(response)
        text = (tagged[-1] if tagged else response).strip()
        return float(_scorer(self.task, self.params).score_answer(text, dict(self.entry)))


def read_gym(name: str, size: int | None, seed: int) -> Rows:
    """`size` entries of `reasoning_gym:TASK?key=value&key=value`, drawn with a seed that depends on `seed` alone."""
    task, _, params = name.removeprefix(PREFIX).partition("?")
    dataset = _create(name, task, params, size or DEFAULT_SIZE, derive_seed(seed, "data.gym") % 2**31)
    try:
        entries = [dataset[index] for index in range(len(dataset))]
    except Exception as e:  # some parameters are only found out when the task is drawn
        raise DataError(f"{name}: the task cannot be drawn with these parameters ({one_line(e)})") from e
    rows: list[Row] = [{"question": entry["question"], "gym": GymAnswer(task, params, entry)} for entry in entries]
    return Rows(name, rows)


@lru_cache(maxsize=64)
def _scorer(task: str, params: str) -> Any:
    return _create(f"{PREFIX}{task}?{params}", task, params, 1, 0)


def _create(name: str, task: str, params: str, size: int, seed: int) -> Any:
    try:
        with warnings.catch_warnings():
            # A package that it imports warns about its own syntax when it is compiled for the first time.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym  # noqa: F401  (its import registers the tasks)
            from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as e:
        raise MissingDependency(f'{name}: needs the package reasoning-gym: pip install "verl[quickstart]"') from e
    if task not in DATASETS:
        hint = suggestion(task, list(DATASETS))
        raise DataError(
            f"{name}: no reasoning_gym task {task!r}{hint}; there are {len(DATASETS)}, such as chain_sum, countdown"
        )
    values = _parse(name, params)
    known = [f.name for f in dataclasses.fields(DATASETS[task][1]) if f.name not in RESERVED]
    for key in values:
        if key not in known:
            raise DataError(
                f"{name}: task {task} has no parameter {key!r}{suggestion(key, known)}; it has: {', '.join(known)}"
            )
    try:
        return create_dataset(task, size=size, seed=seed, **values)
    except (AssertionError, ValueError, TypeError) as e:
        raise DataError(f"{name}: {one_line(e)}") from e


def _parse(name: str, params: str) -> dict[str, Any]:
    """`a=2&b=true` as values; each is read as YAML."""
    values: dict[str, Any] = {}
    for pair in filter(None, params.split("&")):
        key, sep, value = pair.partition("=")
        if not sep or not key:
            raise DataError(f"{name}: {pair!r} is not key=value; parameters are written TASK?key=value&key=value")
        if key in RESERVED:
            raise DataError(f"{name}: {key} is set by {RESERVED[key]}, not in the name")
        if key in values:
            raise DataError(f"{name}: {key} is given twice")
        try:
            values[key] = yaml.safe_load(unquote(value))
        except yaml.YAMLError as e:
            raise DataError(f"{name}: cannot read the value of {key}: {value!r}") from e
    return values
