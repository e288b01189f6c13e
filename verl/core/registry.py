"""Registries: how an algorithm, loss, schema or backend is found by its config name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from verl.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry(Generic[F]):
    """One registered function: `needs` names the columns it reads, `config` is the class of its constants.

    prepare: for a function that is called on parts, what it must see the whole for first; None for most.
    """

    name: str
    fn: F
    needs: tuple[str, ...] = ()
    config: type | None = None
    prepare: Callable[..., Any] | None = None

    @property
    def doc(self) -> str:
        return (self.fn.__doc__ or "").strip()


def suggestion(word: str, known: list[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


class Registry(Generic[F]):
    """Name to entry. A second registration under one name is an error, never a silent replacement."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, Entry[F]] = {}

    def register(
        self,
        name: str,
        *,
        needs: tuple[str, ...] = (),
        config: type | None = None,
        prepare: Callable[..., Any] | None = None,
    ) -> Callable[[F], F]:
        def add(fn: F) -> F:
            if name in self._entries:
                raise ConfigError(f"{self.kind} {name!r} is registered twice; choose another name")
            self._entries[name] = Entry(name, fn, needs, config, prepare)
            return fn

        return add

    def __getitem__(self, name: str) -> Entry[F]:
        if name not in self._entries:
            hint = suggestion(name, list(self._entries))
            raise ConfigError(f"{self.kind}: unknown name {name!r}{hint}; known: {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry[F]]:
        return iter(self._entries.values())

    def names(self) -> list[str]:
        return sorted(self._entries)
