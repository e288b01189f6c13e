"""One call from a config to a trained, saved model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.config.run import RunConfig
from verl.core.protocols import RewardFn
from verl.trainer.build import Run, build
from verl.utils.console import RunConsole


@dataclass(frozen=True)
class RunResult:
    """How a run ended. metrics: of the last step."""

    steps_planned: int
    steps_trained: int
    output_dir: Path
    metrics: dict[str, float]


def run(cfg: RunConfig, functions: Sequence[tuple[RewardFn, float]] = ()) -> RunResult:
    """Train as `cfg` says and leave the model in cfg.trainer.output_dir. functions: (reward function, weight) pairs
    beside those that the config names.
    """
    console = RunConsole()
    try:
        built = build(cfg, console, functions)
        trainer, folder = built.trainer, built.folder
        try:
            _train(built, console)
        finally:
            built.close()
        last = trainer.last_metrics
        if last:
            console.final(
                cfg.trainer.num_episodes,
                trainer.source.steps_per_episode,
                last["reward"],
                last.get("kl"),
                cfg.trainer.output_dir,
            )
        else:
            console.info(f"All {trainer.planned_steps} steps were trained before | Saved to {cfg.trainer.output_dir}")
        return RunResult(trainer.planned_steps, trainer.step, folder.root, last)
    finally:
        console.close()


def _train(built: Run, console: RunConsole) -> None:
    """All steps, and the model into its folder."""
    try:
        built.trainer.fit()
    finally:
        built.tracker.close()
    console.phase("save")
    staged = built.folder.staging()
    built.trainer.roles.actor.call("export", folder=str(staged)).result()
    built.folder.adopt(staged)
