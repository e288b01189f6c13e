"""Code from outside the package: found by file or module name, its faults told in one line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType

from verl.core.errors import VerlError


def load_module(where: str, at: str, error: type[VerlError]) -> ModuleType:
    """`FILE.py` or `package.module`, imported once. A fault is an `error` that begins with `at`."""
    if not where.strip("."):
        raise error(f"{at}: {where!r} names nothing; give FILE.py or package.module")
    return _file(where, at, error) if where.endswith(".py") else _named(where, at, error)


def describe(error: BaseException) -> str:
    """`TypeError: message (FILE.py, line 3)` in one line; the place is where outside code raised it."""
    text = " ".join(str(error).split())
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f" ({Path(frame.tb_frame.f_code.co_filename).name}, line {frame.tb_lineno})" if frame is not None else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _file(where: str, at: str, error: type[VerlError]) -> ModuleType:
    file = Path(where).expanduser()
    if not file.is_file():
        raise error(f"{at}: no such file {where}")
    name = f"verl_outside_{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # a script that exits at its end, too
        del sys.modules[name]
        raise error(f"{at}: importing {where} raised {describe(e)}") from e
    return module


def _named(where: str, at: str, error: type[VerlError]) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name is not None and (where == e.name or where.startswith(f"{e.name}.")):
            raise error(f"{at}: no module {e.name!r}; install it, or give a path FILE.py") from e
        raise error(f"{at}: importing {where} raised {describe(e)}") from e
    except (Exception, SystemExit) as e:
        raise error(f"{at}: importing {where} raised {describe(e)}") from e
