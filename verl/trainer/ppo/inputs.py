"""Models and data that were given in memory, as files: the configuration and other processes know paths only."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from verl.core.errors import ConfigError, ModelError
from verl.data.memory import write_jsonl
from verl.models.source import LoadedSource, first_line
from verl.trainer.folder import RunFolder


class Inputs:
    """Files in `.inputs/` of a run's folder (which all machines of a cluster must see), gone at the end of the `with`.

    Names end in a hash of the contents, so a run that is gone on with finds the same files under the same names, and
    is refused, by the path that differs, where they are not the same. One process at a time.
    """

    def __init__(self, output_dir: str | Path):
        self.home = Path(output_dir).expanduser().resolve() / ".inputs"
        self._saved: dict[int, str] = {}
        self._lock: Any = None

    def __enter__(self) -> Inputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            shutil.rmtree(self.home, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def model(self, key: str, module: nn.Module, tokenizer: Any) -> str:
        """Save a transformers module once, however many roles it has; its folder.

        tokenizer: None for a role that needs none. ModelError begins with `key`.
        """
        if id(module) not in self._saved:
            draft = self._room() / "model.draft"
            try:
                module.save_pretrained(draft)  # type: ignore[operator]
            except (OSError, RuntimeError, ValueError, NotImplementedError) as e:
                raise ModelError(f"{key}: the loaded module cannot be saved ({first_line(e)})") from e
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            self._saved[id(module)] = self._named(draft, "model")
        return self._saved[id(module)]

    def rows(self, key: str, dataset: Any) -> str:
        """Write rows; their file. DataError begins with `key`."""
        draft = self._room() / "data.draft"
        write_jsonl(dataset, draft, key)
        return self._named(draft, "data", ".jsonl")

    def _room(self) -> Path:
        """The folder, ours; what a run that was killed left there goes."""
        if self._lock is None:
            RunFolder(self.home.parent)  # made, writable, and no other run is going on in it
            self._lock = (self.home.parent / ".inputs.lock").open("a")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                self._lock.close()
                self._lock = None
                raise ConfigError(
                    f"trainer.output_dir: another run starts in {self.home.parent}; choose another output_dir"
                ) from e
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.mkdir()
        return self.home

    def _named(self, draft: Path, kind: str, ending: str = "") -> str:
        path = self.home / f"{kind}-{_hash(draft)}{ending}"
        draft.rename(path)
        return str(path)


def _hash(path: Path) -> str:
    """Of a file, or of the names and contents of a folder's files."""
    digest = hashlib.blake2b(digest_size=8)
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        with open(file, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def check_module(key: str, module: nn.Module) -> None:
    """ModelError unless `module` is a whole transformers model that can be saved as a folder."""
    config: Any = getattr(module, "config", None)
    if config is None or not hasattr(module, "save_pretrained"):
        raise ModelError(
            f"{key}: a {type(module).__name__} is no Hugging Face model; load one with from_pretrained, or give a path"
        )
    if getattr(module, "peft_config", None):
        raise ModelError(f"{key}: adapters on a model cannot be trained or read yet; give model.merge_and_unload()")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{key}: the module is quantized; load it in bf16 or fp32")
    if any(p.is_meta for p in module.parameters()):
        raise ModelError(f"{key}: some weights are not in memory (device_map); load the module without it")


def tokenizer_of(key: str, module: nn.Module, code: bool) -> Any:
    """The tokenizer at the place that a module was loaded from."""
    try:
        return LoadedSource(module, code).tokenizer()
    except ModelError as e:
        raise ModelError(f"{key}: {e}") from e
