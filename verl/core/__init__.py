"""Layer 0: the words that all other layers share. Nothing here imports torch except `verl.core.batch`."""

from verl.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingDependency,
    ModelError,
    RewardError,
    RolloutError,
    VerlError,
    WeightsError,
    WorkerError,
)
from verl.core.generation import Completion, GenRequest, SamplingParams
from verl.core.metrics import Metrics
from verl.core.prompt import Message, Prompt
from verl.core.registry import Entry, Registry
from verl.core.trajectory import Trajectory

__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DataError",
    "Entry",
    "GenRequest",
    "Message",
    "Metrics",
    "MissingDependency",
    "ModelError",
    "Prompt",
    "Registry",
    "RewardError",
    "RolloutError",
    "SamplingParams",
    "Trajectory",
    "VerlError",
    "WeightsError",
    "WorkerError",
]
