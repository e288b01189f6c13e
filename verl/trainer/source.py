"""Where a step's trajectories come from. On demand: sampled from the current weights when the step asks."""

from __future__ import annotations

from collections.abc import Sequence

from verl.config.run import RunConfig
from verl.core.generation import SamplingParams
from verl.core.prompt import Prompt
from verl.core.trajectory import Trajectory
from verl.data.sampler import PromptSampler
from verl.workers.rollout import RolloutWorker


def training_params(cfg: RunConfig) -> SamplingParams:
    """The law of training samples."""
    s = cfg.rollout.sampling
    return SamplingParams(s.temperature, s.top_p, s.top_k, cfg.rollout.max_response_tokens, s.min_tokens)


class OnDemandSource:
    """Prompts in the sampler's order, each with cfg.rollout.n samples. Its only state is the step number."""

    def __init__(self, prompts: Sequence[Prompt], sampler: PromptSampler, worker: RolloutWorker, cfg: RunConfig):
        self.prompts, self.sampler, self.worker = prompts, sampler, worker
        self.n, self.params = cfg.rollout.n, training_params(cfg)
        whole = sampler.steps_per_episode
        self.steps_per_episode = min(whole, cfg.trainer.max_steps_per_episode or whole)

    def place(self, step: int) -> tuple[int, int]:
        """(episode from 0, step within it from 0) of training step `step`, counted from 1."""
        return divmod(step - 1, self.steps_per_episode)

    def take(self, step: int) -> list[Trajectory]:
        chosen = [self.prompts[i] for i in self.sampler.indices(*self.place(step))]
        return self.worker.sample(chosen, self.n, self.params, "rollout", step)
