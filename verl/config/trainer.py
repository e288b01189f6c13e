"""The run: how long, where its files go, what is saved and shown."""

from typing import Literal

from pydantic import Field

from verl.config.base import Section


class TrainerConfig(Section):
    """The loop and its outputs."""

    output_dir: str = Field("./outputs/quickstart", min_length=1)
    """Folder of the run: config, metrics, samples, checkpoints, the final model."""
    num_episodes: int = Field(1, ge=1)
    """Passes over the data."""
    max_steps_per_episode: int | None = Field(None, ge=1)
    """Cut each pass after this many steps; null: the whole data set."""
    prompts_per_step: int = Field(16, ge=1)
    """Prompts sampled in a step; with rollout.n responses each."""
    seed: int = Field(0, ge=0)
    """Seed of everything that is drawn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; auto takes a GPU if there is one."""
    log_every: int = Field(10, ge=1)
    """Steps between log lines; metrics.jsonl has every step."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: none but the final model."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many checkpoints stay."""
    resume: bool = False
    """Go on from the newest good checkpoint in output_dir."""
    overwrite: bool = False
    """Start afresh in an output_dir that holds another run; its files are removed."""
    sinks: tuple[str, ...] = ("jsonl", "tensorboard")
    """Where metrics go: jsonl, tensorboard, wandb, mlflow, trackio."""
    run_name: str | None = None
    """Name in the sinks; null: the name of output_dir."""
