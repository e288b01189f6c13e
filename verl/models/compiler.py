"""C++ sources of this package, compiled once a machine by its own compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from verl.core.errors import ConfigError

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_WIDE = "-mprefer-vector-width=512"


def compiler() -> str | None:
    """A C++ compiler of this machine: $CXX, g++ or clang++."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )


@cache
def compiled(name: str, sources: tuple[Path, ...], option: str) -> ctypes.CDLL:
    """The compiled sources, compiled now (seconds) if this machine has not done so yet.

    name: of the file they become. option: the config path that says whether they are used; ConfigError names it where
    there is no compiler, or it fails.
    """
    cxx = compiler()
    if cxx is None:
        raise ConfigError(f"{option}=on needs a C++ compiler (g++ or clang++); install one, or set auto or off")
    runtime = _openmp()
    flags = [*FLAGS, *([_WIDE] if platform.machine() == "x86_64" and "clang" not in cxx else [])]
    units = [source for source in sources if source.suffix == ".cpp"]
    text = [source.read_bytes() for source in sources]
    key = hashlib.sha256(repr((text, flags, cxx, runtime, _cpu())).encode()).hexdigest()[:16]
    file = _folder() / f"{name}-{key}.so"
    if not file.is_file():
        draft = file.with_suffix(f".{os.getpid()}.tmp")
        # Linked to the OpenMP that torch uses: a second one would fight it for the cores.
        command = [cxx, *flags, *map(str, units), "-o", str(draft), *([runtime] if runtime else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            names = " and ".join(source.name for source in units)
            raise ConfigError(f"{option}: {cxx} failed on {names} ({last[:200]}); set {option}=off")
        draft.replace(file)
    return ctypes.CDLL(str(file))


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _openmp() -> str | None:
    """The OpenMP runtime in this process, as a file."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    names = {line.split()[-1] for line in lines if "omp" in Path(line.split()[-1]).name and ".so" in line}
    return min(names) if names else None


def _cpu() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
