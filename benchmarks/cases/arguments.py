"""What the command lines of the benchmarks share: their parser, kinds of values, and `--set`. Imports no torch."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from verl.cli.arguments import Parser
from verl.config import parse_override
from verl.config.loader import Tree
from verl.core.errors import ConfigError


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it is written, and behind each option its default, where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


def parser(description: str | None) -> Parser:
    """Faults are one line and exit code 2, where `main` runs within `run_main`."""
    return Parser(description=description, formatter_class=Help)


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not below `least`."""

    def read(text: str) -> int:
        if not text.strip().lstrip("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
        return int(text)

    return read


def counts(text: str) -> list[int]:
    """Whole numbers of 1 or more, comma-separated."""
    return [at_least(1)(part) for part in text.split(",")]


def share(text: str) -> float:
    """A number above 0 and not above 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and up to 1")
    return value


def python(text: str) -> str:
    """An interpreter that can be started."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no program; give the path of a Python interpreter")
    return text


def words(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of the known names, comma-separated."""

    def read(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"no side {unknown[0]!r}; there are {', '.join(known)}")
        return given

    return read


def add_set(to: argparse.ArgumentParser, paths: Sequence[str]) -> None:
    """`--set`, many times; paths: sections or values that the benchmark reads."""
    to.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help=f"a value of verl's config, as in `verl train`; may be given many times. Read: {', '.join(paths)}",
    )


def overrides(given: Sequence[str], paths: Sequence[str]) -> list[Tree]:
    """The trees of `--set`; ConfigError for a value that the benchmark would not read, such as one that a flag sets."""
    trees = []
    for text in given:
        trees.append(parse_override(text))
        path = text.partition("=")[0].strip()
        if not any(path == known or path.startswith(f"{known}.") for known in paths):
            raise ConfigError(f"--set {path}: not read by this benchmark; read are {', '.join(paths)}")
    return trees


def checked(trees: Sequence[Tree]) -> Any:
    """The configuration of these layers, or the ConfigError that `verl train` would have for them."""
    from verl.algos.presets import preset_values
    from verl.config import resolve

    return resolve(trees, preset_values())
