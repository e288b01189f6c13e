"""`import verl` is light, and every module of the package can be imported by itself."""

import json
import subprocess
import sys

from tests.arch.imports import PACKAGE, ROOT, source_files


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_import_verl_loads_no_torch_and_is_fast() -> None:
    code = (
        "import sys, time, json\nstart = time.perf_counter()\nimport verl\nseconds = time.perf_counter() - start\n"
        "print(json.dumps([verl.__version__, seconds, [m for m in ('torch', 'ray', 'numpy') if m in sys.modules]]))"
    )
    runs = [json.loads(_python(code)) for _ in range(3)]
    version, _, loaded = runs[0]
    assert version == "0.2.0"
    assert loaded == []
    assert min(seconds for _, seconds, _ in runs) < 0.2


def test_help_and_config_load_no_torch() -> None:
    code = "import sys\nimport verl.cli.main, verl.cli.flags\nprint('torch' in sys.modules)"
    assert _python(code).strip() == "False"


def test_every_module_imports() -> None:
    names = []
    for file in source_files():
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    code = (
        "import importlib, json\nbroken = {}\n"
        f"for name in {names!r}:\n    try:\n        importlib.import_module(name)\n"
        "    except ImportError as e:\n        broken[name] = str(e)\nprint(json.dumps(broken))"
    )
    assert json.loads(_python(code)) == {}
