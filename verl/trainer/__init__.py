"""Layer 5: the loop, what builds it from a config, and its hooks."""

from verl.trainer.run import RunResult, run

__all__ = ["RunResult", "run"]
