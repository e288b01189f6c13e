"""Saving a run's state and going on from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from verl.checkpoint.store import CheckpointStore
from verl.config.run import RunConfig
from verl.controller.group import WorkerGroup
from verl.core.errors import CheckpointError, DataError
from verl.trainer.hooks import Hook
from verl.trainer.loop import StepResult, Trainer
from verl.utils.console import RunConsole


class CheckpointHook(Hook):
    """Saves every cfg.trainer.save_every steps. `about` ties a checkpoint to its data and configuration."""

    def __init__(self, cfg: RunConfig, store: CheckpointStore, about: dict[str, Any], console: RunConsole):
        self.cfg, self.store, self.about, self.console = cfg, store, about, console

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        every = self.cfg.trainer.save_every
        if every > 0 and result.step % every == 0:
            self.console.phase("checkpoint")
            models = {name: partial(save_model, group) for name, group in trainer.roles.trained().items()}
            self.store.save(result.step, trainer.state(), self.about, models)

    def resume(self, trainer: Trainer) -> bool:
        """Restore the newest whole checkpoint. False, and a line that says so, where there is none yet."""
        found = self.store.newest()
        if found is None:
            if self.store.steps():
                raise CheckpointError(
                    f"{self.store.root}: no checkpoint is whole; start afresh without --resume (this one is kept aside)"
                )
            self.console.info(f"no checkpoint in {self.store.root} yet: starting from step 0")
            return False
        step, manifest = found
        refuse_other_run(manifest, self.about, self.store.folder(step))
        trainer.load_state(self.store.load(step))
        for name, group in trainer.roles.trained().items():
            group.call("restore", folder=str(self.store.part(step, name).resolve())).result()
        self.console.info(f"Resuming from {self.store.folder(step)}")
        return True


def save_model(group: WorkerGroup, folder: Path) -> None:
    """Have the ranks of a model write its state. CheckpointError where this process does not see what they wrote."""
    for files in group.call("save", folder=str(folder.resolve())).result():
        for name in files:
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"a process wrote {name}, which is not to be seen here: trainer.output_dir must be on a file "
                    "system that all machines share"
                )


MAY_CHANGE = (
    "num_episodes",
    "log_every",
    "save_every",
    "keep_checkpoints",
    "resume",
    "overwrite",
    "output_dir",
    "sinks",
    "run_name",
)


def identity(cfg: RunConfig, data: str) -> dict[str, Any]:
    """What must be the same for a run to go on: the configuration that acts on numbers, and the prompts (a hash)."""
    tree = cfg.model_dump(mode="json")
    tree["trainer"] = {k: v for k, v in tree["trainer"].items() if k not in MAY_CHANGE}
    del tree["parallel"]  # where models run changes no number
    return {"config": tree, "data": data}


def refuse_other_run(manifest: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """CheckpointError naming the first setting that differs from the one the checkpoint was made under."""
    if not isinstance(manifest.get("config"), dict) or "data" not in manifest:
        raise CheckpointError(f"{folder}: its manifest does not say which run made it; start afresh without --resume")
    then, here = dict(_flat(manifest["config"])), dict(_flat(now["config"]))
    for path in sorted(then.keys() | here.keys()):
        if then.get(path) != here.get(path):
            raise CheckpointError(
                f"{path}: {folder} was made with {then.get(path)!r}, this run has {here.get(path)!r}; set it back, or "
                "start another run with another --output_dir"
            )
    if manifest["data"] != now["data"]:
        raise DataError(f"data.dataset: the prompts are not those that {folder} was trained on; restore them to resume")


def _flat(tree: Any, at: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(at, tree)]
    return [pair for k, v in tree.items() for pair in _flat(v, f"{at}.{k}" if at else k)]
