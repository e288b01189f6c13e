"""Command lines whose faults are one line: the parser, and the frame that every command runs in."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from verl.core.errors import ConfigError, VerlError, WorkerError
from verl.core.registry import suggestion

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Faults of the disk that the user can mend, whichever file meets them."""


class Parser(argparse.ArgumentParser):
    """argparse, but a fault is a ConfigError of one line, and an unknown flag comes with a suggestion.

    override: what stands before section.key=value on this command line, "" for nothing; None: it takes none.
    """

    def __init__(self, override: str | None = None, **options: Any):
        self.override = override
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_strictly(self, argv: Sequence[str], words_first: bool = False) -> argparse.Namespace:
        """All of argv, or a ConfigError that names the first word that is not known.

        words_first: positionals may stand anywhere, which argparse itself does not allow; no flag takes a value.
        """
        found, unknown = self.parse_known_args(_words_first(argv) if words_first else list(argv))
        if unknown:
            word, _, value = unknown[0].partition("=")
            flags = [flag for action in self._actions for flag in action.option_strings]
            what = "unknown flag" if word.startswith("-") else "unexpected argument"
            hint = self._as_override(argv, word, value) or suggestion(word, flags)
            raise ConfigError(f"{word}: {what}{hint}; see {self.prog} --help")
        return found

    def _as_override(self, argv: Sequence[str], word: str, value: str) -> str:
        """How `--section.key value` is written; "" for a word without a section."""
        if self.override is None or not re.fullmatch(r"--?\w+(\.\w+)+", word):
            return ""
        after = next((b for a, b in pairwise(argv) if a == word and not b.startswith("--")), "VALUE")
        given = value or after
        return f" (did you mean '{self.override}{word.lstrip('-')}={given}'?)"


def _words_first(argv: Sequence[str]) -> list[str]:
    return [w for w in argv if not w.startswith("--")] + [w for w in argv if w.startswith("--")]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Long flag names get a wide first column."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **{"max_help_position": 34, **options})


def run_main(main: Callable[[], int]) -> int:
    """Exit code of `main`. An error that the user can act on is one line on stderr and 2; Ctrl-C is 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a run must not die of a letter that a terminal lacks
    try:
        return main()
    except VerlError as e:
        if isinstance(e, WorkerError) and e.traceback:
            print(e.traceback, file=sys.stderr)  # of another process: without it there is nothing to look for
        print("error: " + " ".join(str(e).split()), file=sys.stderr)
        return 2
    except OSError as e:
        if isinstance(e, BrokenPipeError) and _reader_has_gone():
            return 141  # as the shell reports SIGPIPE
        if e.errno not in DISK:
            raise
        where = f"{e.filename}: " if e.filename else ""
        print(f"error: {where}{e.strerror}; what was written before stays, go on with --resume", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _reader_has_gone() -> bool:
    """Whether nobody reads our output (`verl config | head`); a pipe that broke elsewhere is another matter."""
    try:
        stdout = sys.stdout.fileno()
    except io.UnsupportedOperation:
        return False
    poll = select.poll()
    poll.register(stdout, 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # Python flushes once more when it exits
    return gone
