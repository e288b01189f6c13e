"""The folder of a run: what lies in it, and how an earlier run in the same place is kept safe."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import yaml

from verl.config.run import RunConfig
from verl.core.errors import ConfigError

OWN = ("config.yaml", "metrics.jsonl", "samples", "checkpoints", "tensorboard")
SINKS = ("wandb", "wandb_run_id.txt", "mlflow_run_id.txt", "mlflow.db")
MODEL = ("config.json", "generation_config.json", "chat_template.jinja")
MODEL_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
)


class RunFolder:
    """root: trainer.output_dir. Made writable or refused at once, before any model loads."""

    def __init__(self, root: str | Path):
        self.root = Path(root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / ".write-test"
            probe.write_text("")
            probe.unlink()
        except OSError as e:
            raise ConfigError(
                f"trainer.output_dir: cannot write to {self.root} ({e.strerror or e}); choose another with --output_dir"
            ) from e

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    def entries(self) -> list[Path]:
        """Files and folders here that a run makes; nothing else in the folder is ever touched."""
        found = [self.root / name for name in OWN + SINKS + MODEL if (self.root / name).exists()]
        return found + sorted(p for pattern in MODEL_PATTERNS for p in self.root.glob(pattern))

    def begin(self, overwrite: bool) -> str | None:
        """Make room for a new run. An earlier one is moved into `previous-N/` here, or removed when overwrite is set.

        Returns a line that says so, or None where there was none.
        """
        old = self.entries()
        if not any(p.name in OWN for p in old):
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
        (self.root / "config.yaml").write_text(text, encoding="utf-8")

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
