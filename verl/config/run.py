"""The whole tree."""

from verl.config.algorithm import AlgorithmConfig, UpdateConfig
from verl.config.base import Section
from verl.config.data import DataConfig
from verl.config.models import ActorConfig, CriticConfig, ModelConfig, RefConfig
from verl.config.parallel import ParallelConfig
from verl.config.reward import RewardConfig
from verl.config.rollout import EvalConfig, RolloutConfig
from verl.config.trainer import TrainerConfig


class RunConfig(Section):
    """One run. `verl train FILE.yaml section.key=value` reads a file, then overrides."""

    model: ModelConfig = ModelConfig()
    """How models run."""
    actor: ActorConfig = ActorConfig()
    """The policy."""
    ref: RefConfig = RefConfig()
    """The frozen reference."""
    critic: CriticConfig = CriticConfig()
    """The value model."""
    data: DataConfig = DataConfig()
    """Prompts."""
    reward: RewardConfig = RewardConfig()
    """What a response is worth."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling for training."""
    eval: EvalConfig = EvalConfig()
    """Sampling for evaluation."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, loss and KL."""
    update: UpdateConfig = UpdateConfig()
    """Mini- and micro-batches."""
    parallel: ParallelConfig = ParallelConfig()
    """Processes."""
    trainer: TrainerConfig = TrainerConfig()
    """The loop and its outputs."""
