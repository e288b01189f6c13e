"""Layer 3: checkpoints that are complete or absent."""

from verl.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore"]
