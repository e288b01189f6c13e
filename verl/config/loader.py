"""From YAML and `a.b=c` to a checked tree. Order: class defaults, preset, file, overrides."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from verl.config.base import Component
from verl.config.run import RunConfig
from verl.core.errors import ConfigError
from verl.core.registry import suggestion

Tree = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of its version 1.2: `off` and `no` are words, 1e-6 is a number. A key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key, _ in node.value if names.count(key.value) > 1), None)
        if twice is not None:  # YAML's own loader would keep the last one and say nothing
            raise yaml.constructor.ConstructorError(
                None, None, f"{twice.value} is given twice; keep one of them", twice.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in pairs if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"),
    list("-+.0123456789"),
)


def _load(text: str) -> Any:
    return yaml.load(text, _Loader)


def read_yaml(path: str | Path) -> Tree:
    """A YAML file as a tree, or a ConfigError that names the file and line."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{file}: no such config file; give the path of a YAML file")
    try:
        tree = _load(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read ({e.strerror}); give the path of a YAML file") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        where = getattr(e, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise ConfigError(f"{file}{line}: not valid YAML ({getattr(e, 'problem', None) or 'not text'})") from e
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected sections such as `actor:` at the top, found a {type(tree).__name__}")
    return tree


def parse_override(text: str) -> Tree:
    """`a.b=c` as a tree; the value is read as YAML, so 1e-6, true, null and [a, b] mean what they say."""
    key, sep, value = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"{text!r}: an override is written section.key=value, for example actor.optim.lr=1e-6")
    try:
        leaf = _load(value) if value.strip() else ""
    except yaml.YAMLError as e:
        raise ConfigError(f"{key}: cannot read the value {value!r}; quote it as in YAML") from e
    return nest(key.strip(), leaf)


def nest(path: str, leaf: Any) -> Tree:
    """`a.b` and a value as {a: {b: value}}."""
    for part in reversed(path.split(".")):
        leaf = {part: leaf}
    return leaf


def overlay(base: Mapping[str, Any], top: Mapping[str, Any], at: str = "") -> Tree:
    """`top` laid over `base`. A component whose name changes drops the constants of the old one."""
    out = dict(base)
    for key, value in top.items():
        path = f"{at}{key}"
        old = out.get(key)
        if path in COMPONENTS:
            old, value = _component(old), _component(value)
            if (
                isinstance(old, Mapping)
                and isinstance(value, Mapping)
                and value.get("name", old.get("name")) != old.get("name")
            ):
                old = None
        out[key] = overlay(old, value, f"{path}.") if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return out


def _component(value: Any) -> Any:
    """A component may be written as its bare name: `algorithm.advantage: gae`."""
    return {"name": value} if isinstance(value, str) else value


def resolve(layers: Sequence[Mapping[str, Any]], presets: Mapping[str, Mapping[str, Any]] | None = None) -> RunConfig:
    """Lay the trees over each other, with the preset that `algorithm.name` chooses beneath them all, and check them."""
    user: Tree = {}
    for layer in layers:
        user = overlay(user, layer)
    section = user.get("algorithm")
    name = section.get("name", "ppo") if isinstance(section, Mapping) else "ppo"
    tree: Tree = RunConfig().model_dump()
    if presets is not None:
        if not isinstance(name, str) or name not in presets:
            hint = suggestion(str(name), list(presets))
            raise ConfigError(f"algorithm.name: unknown preset {name!r}{hint}; known: {', '.join(sorted(presets))}")
        tree = overlay(tree, presets[name])
    return check(RunConfig, overlay(overlay(tree, _implied(user)), user))


def _implied(user: Mapping[str, Any]) -> Tree:
    """What follows from what the user says, beneath what the user says: several processes are Ray's."""
    section = user.get("parallel")
    if not isinstance(section, Mapping):
        return {}
    nproc = section.get("nproc", 1)
    several = (isinstance(nproc, int) and nproc > 1) or section.get("placement", "colocated") != "colocated"
    return {"parallel": {"executor": "ray"}} if several or section.get("address") is not None else {}


def check(cls: type[Any], tree: Mapping[str, Any], at: str = "") -> Any:
    """Build `cls` from a tree; the first fault becomes a one-line ConfigError that starts with its path."""
    try:
        return cls.model_validate(tree)
    except ValidationError as e:
        raise ConfigError(_explain(cls, e, at)) from None


def constants(component: Component, config: type[Any] | None, at: str) -> Any:
    """The constants of a chosen component, checked by the class it was registered with."""
    if config is None:
        if component.constants:
            raise ConfigError(
                f"{at}: {component.name!r} has no constants, but {sorted(component.constants)} were given"
            )
        return None
    return check(config, component.constants, at)


def _explain(cls: type[Any], error: ValidationError, at: str) -> str:
    first = error.errors()[0]
    parts = _place(cls, first["loc"])
    path = ".".join([at, *parts] if at else parts)
    if first["type"] == "extra_forbidden":
        siblings = keys_at(cls, parts[:-1])
        hint = suggestion(parts[-1], siblings)
        if not hint:
            everywhere = {leaf.rsplit(".", 1)[-1]: leaf for leaf in reversed(leaves(cls))}
            near = suggestion(parts[-1], list(everywhere))
            word = near.split("'")[1] if near else ""
            hint = f" (did you mean {everywhere[word]!r}?)" if near else ""
        return f"{path}: unknown key{hint}; keys here: {', '.join(siblings)}"
    # A field of several types has a fault for each of them, all at its own place.
    texts = dict.fromkeys(_told(e["msg"]) for e in error.errors() if _place(cls, e["loc"]) == parts)
    got = first.get("input")
    return f"{path}: {', or '.join(texts)}" + ("" if isinstance(got, (dict, BaseModel)) else f", got {got!r}")


def _told(message: str) -> str:
    """pydantic's words, as they go on after a path."""
    text = message.removeprefix("Value error, ")
    return (text[0].lower() + text[1:]).replace("a valid tuple", "a list, such as [a, b]")


def _place(cls: Any, loc: Sequence[int | str]) -> list[str]:
    """Keys and list indices of pydantic's `loc`, without the names of types that it puts behind a field of several."""
    parts: list[str] = []
    kind: Any = cls
    for part in loc:
        types_here = _members(kind)
        if len(types_here) > 1 and isinstance(part, str):
            kind = next((k for k in types_here if part == getattr(k, "__name__", None)), None)
            continue
        parts.append(str(part))
        kind = _inside(types_here[0], part)
    return parts


def _members(kind: Any) -> list[Any]:
    """The types of a union, None left out; else the type itself."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return [kind]
    return [k for k in typing.get_args(kind) if k is not type(None)]


def _inside(kind: Any, part: int | str) -> Any:
    """Type of what lies at `part` in a value of type `kind`; None where the annotations do not say."""
    fields = getattr(kind, "model_fields", {})
    named = {f.alias or name: f.annotation for name, f in fields.items()}
    if named:
        return named.get(str(part))
    inner = [k for k in typing.get_args(kind) if k is not Ellipsis]
    return inner[-1] if inner else None


def keys_at(cls: type[Any], path: Sequence[str]) -> list[str]:
    """Names of the fields of the section at `path`."""
    for part in path:
        fields = getattr(cls, "model_fields", {})
        field = fields.get(part)
        if field is None or not hasattr(field.annotation, "model_fields"):
            return []
        cls = field.annotation
    return [f.alias or name for name, f in getattr(cls, "model_fields", {}).items()]


def leaves(cls: type[Any], at: str = "") -> list[str]:
    """Path of every value in a tree of sections."""
    out = []
    for name, field in cls.model_fields.items():
        path = f"{at}{field.alias or name}"
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel) and nested is not Component:
            out += leaves(nested, path + ".")
        else:
            out.append(path)
    return out


def _components(cls: type[Any], at: str = "") -> frozenset[str]:
    found: set[str] = set()
    for name, field in cls.model_fields.items():
        if field.annotation is Component:
            found.add(at + name)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _components(field.annotation, f"{at}{name}.")
    return frozenset(found)


COMPONENTS = _components(RunConfig)
"""Paths whose value is a registered function with its constants."""
