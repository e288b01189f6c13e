"""Checkpoints of a run: `checkpoints/step-000020/`, complete or absent, the newest good one found again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl.checkpoint import manifest
from verl.core.errors import CheckpointError, WorkerError

STEP = re.compile(r"step-(\d{6,})$")
FORMAT = 2
"""Of what a checkpoint holds. 1 had whole tensors, in one file a component."""

Write = Callable[[Path], None]
"""Puts a component's files into a folder, which is there and empty."""


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

    def save(
        self,
        step: int,
        state: Mapping[str, Mapping[str, Any]],
        about: Mapping[str, Any],
        sharded: Mapping[str, Write] = MappingProxyType({}),
    ) -> Path:
        """Write a checkpoint in a temporary folder, make it durable, rename, drop old ones.

        state: plain values by component, which become a JSON file each; sharded: what writes the state of a component
        that is on several ranks. A kill at any moment leaves the earlier checkpoints as they were.
        """
        work, final = self.root / f".writing-{step:06d}", self.folder(step)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            for name, write in sharded.items():
                (work / name).mkdir()
                write(work / name)
            for name, tree in state.items():
                (work / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
            made = {"format": FORMAT, "step": step, "components": sorted(state), "sharded": sorted(sharded)}
            manifest.write(work, {**about, **made})
            manifest.fsync_tree(work)
        except (OSError, CheckpointError, WorkerError) as e:  # a full disk is any of them, by who meets it
            shutil.rmtree(work, ignore_errors=True)
            raise CheckpointError(f"{final}: cannot write the checkpoint ({e}); earlier ones are untouched") from e
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
        manifest.fsync(self.root)
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
        """Component name to state, of those with plain values; a sharded one is in its folder. Call after `newest` has
        verified it. CheckpointError where another version wrote it.
        """
        folder = self.folder(step)
        made = json.loads((folder / manifest.NAME).read_text(encoding="utf-8"))
        if made.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder}: another version of verl wrote this checkpoint (format {made.get('format', 1)}, this one "
                f"reads {FORMAT}); go on with that version, or start afresh without --resume"
            )
        return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in made["components"]}

    def part(self, step: int, name: str) -> Path:
        """Folder of a sharded component."""
        return self.folder(step) / name
