"""The configuration reference, read from the classes: path, type, default and the text under each field."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, cast

from pydantic import BaseModel

from verl.config.base import Component
from verl.config.run import RunConfig
from verl.core.errors import ConfigError
from verl.core.registry import suggestion


@dataclass(frozen=True)
class Row:
    """One value of the configuration."""

    path: str
    type: str
    default: str
    doc: str
    annotation: Any


@dataclass(frozen=True)
class SectionDoc:
    """One section with the values that lie directly in it."""

    path: str
    doc: str
    rows: tuple[Row, ...]


def sections() -> list[SectionDoc]:
    """Every section of the tree, in the order of the classes."""
    return list(_walk(RunConfig(), "", ""))


@cache
def rows() -> dict[str, Row]:
    """Every value by its path."""
    return {row.path: row for section in sections() for row in section.rows}


def value_at(config: Any, path: str) -> Any:
    """The value of a resolved configuration at `path`; a component's constants count. None where there is none."""
    for part in path.split("."):
        constants = config.constants if isinstance(config, Component) else {}
        config = constants[part] if part in constants else getattr(config, part, None)
    return config.name if isinstance(config, Component) else config


def show(value: Any) -> str:
    """A value as one writes it in YAML or after `key=`."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return re.sub(r"e-0", "e-", repr(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return str(value)


def type_text(annotation: Any) -> str:
    """`int`, `str or null`, `auto | native | transformers`, `list of str`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:  # a type with its bounds
        return type_text(args[0])
    if origin is Literal:
        return " | ".join(str(a) for a in args)
    if origin in (Union, types.UnionType):
        names = ["null" if a is type(None) else type_text(a) for a in args]
        return " or ".join(names)
    if origin is tuple:
        inner = [type_text(a) for a in args if a is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in args else f"[{', '.join(inner)}]"
    if isinstance(annotation, type) and issubclass(annotation, Component):
        return "name or {name: ..., constants}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return getattr(annotation, "__name__", str(annotation))


def _walk(section: BaseModel, path: str, doc: str) -> typing.Iterator[SectionDoc]:
    own: list[Row] = []
    nested: list[SectionDoc] = []
    cls = type(section)
    for name, field in cls.model_fields.items():
        value = getattr(section, name)
        at, text = f"{path}.{name}".lstrip("."), _one_line(field.description or "")
        if isinstance(value, BaseModel) and not isinstance(value, Component):
            nested += _walk(value, at, text)
        else:
            own.append(Row(at, type_text(field.annotation), show(value), text, field.annotation))
    if own:
        summary = _one_line((cls.__doc__ or "").strip().split("\n")[0])
        told = summary.startswith(doc.rstrip("."))
        yield SectionDoc(path, summary if told else f"{doc} {summary}", tuple(own))
    yield from nested


def _one_line(words: str) -> str:
    return " ".join(words.split())


def components() -> list[SectionDoc]:
    """The registered advantages and losses with their constants. Imports torch."""
    from verl.algos.advantages import ADVANTAGES
    from verl.algos.policy_losses import POLICY_LOSSES

    out = []
    for path, registry in (("algorithm.advantage", ADVANTAGES), ("algorithm.policy_loss", POLICY_LOSSES)):
        for entry in registry:
            fields = cast(type[BaseModel], entry.config).model_fields if entry.config is not None else {}
            own = [
                Row(
                    f"{path}.{name}",
                    type_text(f.annotation),
                    show(f.get_default()),
                    _one_line(f.description or ""),
                    f.annotation,
                )
                for name, f in fields.items()
            ]
            out.append(SectionDoc(f"{path} = {entry.name}", _one_line(entry.doc), tuple(own)))
    return out


def _table(section: SectionDoc) -> list[str]:
    out = ["", f"## {section.path}", "", section.doc]
    if section.rows:
        out += ["", "| path | type | default | |", "|---|---|---|---|"]
    for row in section.rows:
        cells = (f"`{row.path}`", row.type, f"`{row.default}`" if row.default else '`""`', row.doc)
        out.append("| " + " | ".join(c.replace("|", r"\|") for c in cells) + " |")
    return out


def markdown() -> str:
    """The page docs/reference/config.md."""
    out = [
        "# Configuration reference",
        "",
        "Made from the classes in `verl/config` by `make docs`; do not edit it by hand. "
        "Every value can be set in a YAML file or as `path=value` after `verl train`. "
        "A preset (`algorithm.name`) fills the section `algorithm`; `verl algorithms` lists them.",
    ]
    for section in [*sections(), *components()]:
        out += _table(section)
    return "\n".join(out) + "\n"


def text(prefix: str | None = None) -> str:
    """The reference for a terminal: all, or what lies at or under `prefix`. ConfigError for an unknown one."""
    pages = sections()
    if prefix is not None and prefix.startswith("algorithm"):
        pages += components()
    kept = [(page, [r for r in page.rows if prefix is None or _under(r.path, prefix)]) for page in pages]
    if not any(found for _, found in kept):
        known = [s.path for s in sections()] + list(rows())
        raise ConfigError(f"{prefix}: no such section or value{suggestion(str(prefix), known)}; try: verl config")
    out = []
    for section, found in kept:
        if found:
            out.append(f"{section.path}: {section.doc}")
            out += [f"  {r.path} = {r.default}  ({r.type})\n      {r.doc}" for r in found]
            out.append("")
    return "\n".join(out).rstrip() + "\n"


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")
