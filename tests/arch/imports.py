"""Reads the imports of the package from its source, those inside functions too."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "verl"


@dataclass(frozen=True)
class Import:
    """`file` (relative to the repository) imports `module`. typing_only: under `if TYPE_CHECKING`."""

    file: str
    module: str
    typing_only: bool


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(file: Path) -> list[Import]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    out = []
    for node in ast.walk(tree):
        for module in _modules(node, file):
            out.append(Import(str(file.relative_to(ROOT)), module, id(node) in typing_only))
    return out


def _modules(node: ast.AST, file: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{file}: relative import; write it in full"
        base = node.module or ""
        # `from verl import config` imports verl.config; `from verl.config import X` imports verl.config.
        return [f"verl.{alias.name}" for alias in node.names] if base == "verl" else [base]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "importlib.import_module",
        "import_module",
        "__import__",
    ):
        first = node.args[0] if node.args else None
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def all_imports() -> list[Import]:
    return [found for file in source_files() for found in imports_of(file)]
