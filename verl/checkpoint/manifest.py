"""The manifest of a checkpoint: every file with its size and hash, so that damage is found before a load."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from verl.core.errors import CheckpointError

NAME = "manifest.json"


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write(folder: Path, about: dict[str, Any]) -> None:
    """Hash all files of the folder and of those in it, and write the manifest last."""
    files = {
        p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": file_hash(p)}
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    text = json.dumps({**about, "files": files}, indent=1, sort_keys=True)
    (folder / NAME).write_text(text, encoding="utf-8")


def verify(folder: Path) -> dict[str, Any]:
    """The manifest, after every file was found whole; CheckpointError otherwise."""
    try:
        manifest = json.loads((folder / NAME).read_text(encoding="utf-8"))
        files = manifest["files"].items()
        sizes = {name: (want["bytes"], want["sha256"]) for name, want in files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{folder}: no readable {NAME} ({type(e).__name__})") from e
    for name, (size, sha256) in sizes.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing from the checkpoint")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, the manifest says {size}")
        if file_hash(path) != sha256:
            raise CheckpointError(f"{path}: damaged (its hash is not the manifest's)")
    return dict(manifest)


def fsync_tree(folder: Path) -> None:
    """Make the folder's files and names durable, and those of folders in it, before it is renamed into place."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def fsync(path: Path) -> None:
    """Make a file's bytes durable, or which names a folder has."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
