"""PPO from Python: `FSDPPPOTrainer`."""

from verl.trainer.ppo.trainer import FSDPPPOTrainer

__all__ = ["FSDPPPOTrainer"]
