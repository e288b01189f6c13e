"""Rules of the source itself: file sizes, and that every value of the configuration is read somewhere."""

import ast

from tests.arch.imports import PACKAGE, ROOT, source_files
from verl.cli.reference import rows

LONGEST_FILE = 450


def _attributes_read_outside_config() -> set[str]:
    names: set[str] = set()
    for file in source_files():
        if PACKAGE / "config" in file.parents:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    return names


def test_files_are_small() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in source_files()}
    long = {str(file.relative_to(ROOT)): n for file, n in lengths.items() if n > LONGEST_FILE}
    assert not long


def test_every_config_value_has_a_reader() -> None:
    read = _attributes_read_outside_config()
    unread = [path for path in rows() if path.rsplit(".", 1)[-1] not in read]
    assert not unread, f"nothing outside verl/config reads {unread}"


def test_every_config_value_is_documented() -> None:
    assert not [path for path, row in rows().items() if not row.doc.endswith((".", "?"))]


def test_no_swallowed_exception() -> None:
    """No bare except, and no handler of Exception that does not raise."""
    faults = []
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                if node.type is None or (broad and not any(isinstance(n, ast.Raise) for n in ast.walk(node))):
                    faults.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not faults
