"""Flags for scripts: each sets one or more values of the configuration, and its help is the value's own text."""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl.cli import reference
from verl.cli.arguments import Parser
from verl.config import RunConfig, parse_override
from verl.config.loader import Tree, nest, overlay
from verl.core.errors import ConfigError


@dataclass(frozen=True)
class Flag:
    """`--name VALUE` sets the configuration values at `paths`; doc: for paths that the reference does not list."""

    name: str
    paths: tuple[str, ...]
    doc: str = ""

    @property
    def annotation(self) -> Any:
        row = reference.rows().get(self.paths[0])
        return row.annotation if row else float

    @property
    def help(self) -> str:
        row = reference.rows().get(self.paths[0])
        return self.doc or (row.doc if row else "")

    @property
    def choices(self) -> tuple[str, ...] | None:
        return typing.get_args(self.annotation) if typing.get_origin(self.annotation) is Literal else None

    def tree(self, text: str | bool) -> Tree:
        """What `--name text` means. Text stays text where the value is a string; elsewhere it is read as YAML."""
        out: Tree = {}
        for path in self.paths:
            literal = isinstance(text, bool) or _is_text(self.annotation)
            out = overlay(out, nest(path, text) if literal else parse_override(f"{path}={text}"))
        return out


def _is_text(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_is_text(a) for a in typing.get_args(annotation))
    return annotation is str or typing.get_origin(annotation) is Literal


@dataclass(frozen=True)
class FlagTable:
    """The flags of a script. resolve: from the layers that the flags make (lowest first) to a checked configuration."""

    flags: tuple[Flag, ...]
    resolve: Callable[[Sequence[Tree]], RunConfig]

    def parse(self, argv: Sequence[str], description: str) -> tuple[RunConfig, bool]:
        """(configuration, whether --dry-run was given). `--help` prints the values in force and exits.

        Raises ConfigError, which names the flag where a flag set the value at fault.
        """
        parser = Parser(override="--set ", description=description, add_help=False)
        for flag in self.flags:
            parser.add_argument(f"--{flag.name}", **_options(flag))
        parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help=_SET_HELP)
        parser.add_argument(
            "--dry-run", action="store_true", help="print the resolved config and the sizes, train nothing"
        )
        parser.add_argument("--help", "-h", action="store_true", help="show this and exit")
        given = parser.parse_strictly(argv)
        cfg = self._resolve(given)
        if given.help:
            self._describe(parser, cfg)
            parser.print_help()
            sys.exit(0)
        return cfg, given.dry_run

    def _resolve(self, given: argparse.Namespace) -> RunConfig:
        used = [flag for flag in self.flags if getattr(given, flag.name) is not None]
        try:
            layers = [flag.tree(getattr(given, flag.name)) for flag in used]
            return self.resolve(layers + [parse_override(word) for word in given.set])
        except ConfigError as e:
            for flag in used:
                if any(str(e).startswith(f"{path}:") for path in flag.paths):
                    raise ConfigError(f"--{flag.name}: {e}") from None
            raise

    def _describe(self, parser: Parser, cfg: RunConfig) -> None:
        actions = {action.dest: action for action in parser._actions}
        for flag in self.flags:
            value = reference.show(reference.value_at(cfg, flag.paths[0]))
            text = f"{flag.help} [{', '.join(flag.paths)} = {value}]"
            actions[flag.name].help = text.replace("%", "%%")


_SET_HELP = "any other value of the configuration; `verl config` lists them. May be given many times"


def _options(flag: Flag) -> dict[str, Any]:
    if flag.annotation is bool:
        return {"action": "store_const", "const": True, "default": None}
    metavar = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.paths[0].rsplit(".", 1)[-1].upper()
    return {"metavar": metavar, "default": None}
