"""C++ sources of this package, compiled once a machine by its own compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TypeVar

from verl.core.errors import ConfigError

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_WIDE = "-mprefer-vector-width=512"


K = TypeVar("K")


class CompileError(Exception):
    """Why there are no kernels, as a clause that goes on after a colon."""


def choose(mode: str, option: str, unfit: str | None, load: Callable[[], K]) -> tuple[K | None, str]:
    """(kernels, "") or (None, why not).

    mode: `auto`, `on` or `off`, as the config path `option` has it. unfit: why this model cannot use them;
    `auto` has nothing to say about that. Raises ConfigError where `on` cannot be.
    """
    if mode == "off" or (unfit and mode == "auto"):
        return None, f"{option}=off" if mode == "off" else ""
    try:
        if unfit:
            raise CompileError(unfit)
        return load(), ""
    except CompileError as e:
        if mode == "on":
            raise ConfigError(f"{option}=on: {e}; set auto or off") from e
        return None, f"{option}: {e}"


def compiler() -> list[str]:
    """The command of a C++ compiler of this machine: $CXX, g++ or clang++. CompileError where there is none."""
    if wanted := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(wanted[0]) is None:
            raise CompileError(f"the environment variable CXX names {wanted[0]}, which is not a program here")
        return wanted
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise CompileError("no C++ compiler here (g++ or clang++; or name one in the environment variable CXX)")
    return [found]


_LOCK = Lock()


@cache
def compiled(name: str, sources: tuple[Path, ...]) -> ctypes.CDLL:
    """The compiled sources, compiled now (seconds) if this machine has not done so yet. CompileError where that fails.

    name: of the file they become.
    """
    cxx, runtime = compiler(), _openmp()
    wide = platform.machine() == "x86_64" and not any("clang" in word for word in cxx)
    flags = [*FLAGS, *([_WIDE] if wide else [])]
    text = [source.read_bytes() for source in sources]
    key = hashlib.sha256(repr((text, flags, cxx, runtime, _cpu())).encode()).hexdigest()[:16]
    try:
        with _LOCK:
            file = _folder() / f"{name}-{key}.so"
            if not _whole(file):
                _compile([*cxx, *flags], sources, file, runtime)
            return ctypes.CDLL(str(file))
    except OSError as e:
        raise CompileError(f"what is compiled cannot be kept or loaded ({e}); set XDG_CACHE_HOME") from e


def _compile(command: list[str], sources: tuple[Path, ...], file: Path, runtime: str | None) -> None:
    """Into a folder of its own first, so that nobody loads half of it or what does not load."""
    units = [source for source in sources if source.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".making-") as folder:
        draft = Path(folder) / file.name
        # Linked to the OpenMP that torch uses: a second one would fight it for the cores.
        parts = [*command, *map(str, units), "-o", str(draft), *([runtime] if runtime else [])]
        done = subprocess.run(parts, capture_output=True, text=True, env={**os.environ, "TMPDIR": folder})
        if done.returncode != 0 or not draft.is_file():
            names = ", ".join(source.name for source in units)
            raise CompileError(f"{command[0]} failed on {names} ({_reason(done.stderr)}); CXX names another compiler")
        ctypes.CDLL(str(draft))
        _digest_of(file).write_text(_digest(draft))
        draft.replace(file)


def _reason(stderr: str) -> str:
    """The first line that calls itself an error, else the last."""
    lines = stderr.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])[:200]


def _whole(file: Path) -> bool:
    """Whether the file is there as it was made: a damaged one must not be loaded."""
    return file.is_file() and _digest_of(file).is_file() and _digest_of(file).read_text() == _digest(file)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _digest_of(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _folder() -> Path:
    """$XDG_CACHE_HOME/verl, where that is an absolute path; else ~/.cache/verl."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (base if base.is_absolute() else Path("~/.cache").expanduser()) / "verl"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _openmp() -> str | None:
    """The OpenMP runtime in this process, as a file."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    files = {line.split()[-1] for line in lines}
    found = [file for file in files if re.match(r"lib[gi]?omp\d*\b.*\.so", Path(file).name)]
    return min(found, key=lambda file: ("torch" not in file, file), default=None)


def _cpu() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
