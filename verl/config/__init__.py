"""Layer 1: the typed configuration. One file a section; `RunConfig` is the tree."""

from verl.config.base import Component, Section
from verl.config.loader import parse_override, read_yaml, resolve
from verl.config.run import RunConfig

__all__ = ["Component", "RunConfig", "Section", "parse_override", "read_yaml", "resolve"]
