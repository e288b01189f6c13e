"""Checkpoints of a run: `checkpoints/step-000020/`, complete or absent, the newest good one found again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from verl.checkpoint import manifest
from verl.checkpoint.tree import join, split
from verl.core.errors import CheckpointError

STEP = re.compile(r"step-(\d{6,})$")


class CheckpointStore:
    """root: the run's checkpoints folder; keep: how many stay."""

    def __init__(self, root: str | Path, keep: int = 2, warn: Callable[[str], None] = print):
        self.root, self.keep, self.warn = Path(root), keep, warn

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending."""
        if not self.root.is_dir():
            return []
        return sorted(int(m[1]) for p in self.root.iterdir() if (m := STEP.match(p.name)))

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def save(self, step: int, state: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> Path:
        """Write `state` (component name to state tree) in a temporary folder, make it durable, rename, drop old ones.

        A kill at any moment leaves the earlier checkpoints as they were.
        """
        work, final = self.root / f".writing-{step:06d}", self.folder(step)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            for name, tree in state.items():
                tensors, plain = split(tree)
                if tensors:
                    save_file(tensors, work / f"{name}.safetensors")
                (work / f"{name}.json").write_text(json.dumps(plain), encoding="utf-8")
            manifest.write(work, {**about, "step": step, "components": sorted(state)})
            manifest.fsync_tree(work)
        except (OSError, SafetensorError) as e:  # a full disk is either, by which file it meets
            shutil.rmtree(work, ignore_errors=True)
            raise CheckpointError(f"{final}: cannot write the checkpoint ({e}); earlier ones are untouched") from e
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
        manifest.fsync_tree(self.root)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder(old))
        return final

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """(step, manifest) of the newest checkpoint that is whole; damaged ones are said and passed over."""
        for step in reversed(self.steps()):
            try:
                return step, manifest.verify(self.folder(step))
            except CheckpointError as e:
                self.warn(f"checkpoint passed over: {e}")
        return None

    def load(self, step: int) -> dict[str, dict[str, Any]]:
        """Component name to state tree. Call after `newest` has verified it."""
        folder = self.folder(step)
        out = {}
        for name in json.loads((folder / manifest.NAME).read_text(encoding="utf-8"))["components"]:
            flat: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            path = folder / f"{name}.safetensors"
            if path.is_file():
                with safe_open(path, framework="pt") as f:
                    flat |= {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
            out[name] = join(flat)
        return out
