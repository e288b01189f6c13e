"""The folder of a run: what lies in it, and how an earlier run in the same place is kept safe."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import yaml

from verl.config.run import RunConfig
from verl.core.errors import ConfigError

OWN = ("config.yaml", "metrics.jsonl", "samples", "checkpoints", "tensorboard")
SINKS = ("wandb", "wandb_run_id.txt", "mlflow_run_id.txt", "mlflow.db")
MODEL = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
SHARDS = "model-*-of-*.safetensors"
SECTIONS = {"actor", "rollout", "trainer"}


class RunFolder:
    """root: trainer.output_dir. Made writable or refused at once, before any model loads.

    One process at a time: the system frees the lock when the process ends, however it ends.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root).expanduser()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = (self.root / ".lock").open("a")
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(
                f"trainer.output_dir: another run is going on in {self.root}; wait for its end, or choose another "
                "folder with --output_dir"
            ) from e
        except (OSError, ValueError) as e:  # ValueError: a null character in the name
            why = getattr(e, "strerror", None) or e
            raise ConfigError(
                f"trainer.output_dir: cannot write to {self.root} ({why}); choose another with --output_dir"
            ) from e

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    def entries(self) -> list[Path]:
        """Files and folders here that a run makes, its config last; nothing else in the folder is ever touched."""
        found = [self.root / name for name in SINKS + MODEL + OWN[::-1] if (self.root / name).exists()]
        return sorted(self.root.glob(SHARDS)) + found

    def holds_run(self) -> bool:
        """Whether the config.yaml here is one that a run wrote."""
        try:
            tree = yaml.safe_load((self.root / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return False
        return isinstance(tree, dict) and tree.keys() >= SECTIONS

    def check(self) -> None:
        """ConfigError where files of a run's names are no run's: a model of the user's, or another program's files."""
        old = self.entries()
        if old and not self.holds_run():
            raise ConfigError(
                f"trainer.output_dir: {self.root} holds {old[0].name}, which no run made and this one would replace; "
                "choose another folder with --output_dir"
            )

    def begin(self, overwrite: bool) -> str | None:
        """Make room for a new run. An earlier one is moved into `previous-N/` here, or removed when overwrite is set.

        Returns a line that says so, or None where there was none.
        """
        self.check()
        old = self.entries()
        if not old:
            return None
        if overwrite:
            for path in old:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            return f"{self.root}: an earlier run was removed (overwrite is set)"
        n = 1
        while (self.root / f"previous-{n}").exists():
            n += 1
        aside = self.root / f"previous-{n}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        return (
            f"{self.root} holds an earlier run: moved to {aside} (--resume goes on with a run, --overwrite removes it)"
        )

    def write_config(self, cfg: RunConfig) -> None:
        text = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        draft = self.root / ".config.yaml.tmp"
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, self.root / "config.yaml")

    def staging(self) -> Path:
        """A folder to export into."""
        path = self.root / ".saving"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def adopt(self, staged: Path) -> None:
        """Move the exported files to the top of the run folder, the config last, so that a half-moved model does not
        load.
        """
        for path in sorted(staged.iterdir(), key=lambda p: p.name == "config.json"):
            os.replace(path, self.root / path.name)
        staged.rmdir()
