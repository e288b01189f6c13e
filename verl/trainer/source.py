"""Where a step's trajectories come from. On demand: sampled from the current weights when the step asks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

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


def steps_per_episode(cfg: RunConfig, sampler: PromptSampler) -> int:
    """Steps of a pass over the data, cut as configured."""
    whole = sampler.steps_per_episode
    return min(whole, cfg.trainer.max_steps_per_episode or whole)


@dataclass(frozen=True)
class Group:
    """One prompt's samples. index: of the prompt in the training data; greedy: None unless it was asked for."""

    index: int
    samples: tuple[Trajectory, ...]
    greedy: Trajectory | None = None

    @property
    def row(self) -> list[Trajectory]:
        """The samples, and the greedy response behind them."""
        return [*self.samples, *([] if self.greedy is None else [self.greedy])]


Finishing = Generator[dict[int, Group], None, None]
"""Groups by place among the prompts asked for, as each step of the engine finishes them; often none."""


class OnDemandSource:
    """Prompts in the sampler's order, each with cfg.rollout.n samples and, where `greedy`, the most probable response.

    Its only state is which prompts are retired.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampler: PromptSampler,
        worker: RolloutWorker,
        cfg: RunConfig,
        greedy: bool = False,
    ):
        self.prompts, self.sampler, self.worker, self.greedy = prompts, sampler, worker, greedy
        self.n, self.params = cfg.rollout.n, training_params(cfg)
        self.retired: set[int] = set()
        self.steps_per_episode = steps_per_episode(cfg, sampler)

    def place(self, step: int) -> tuple[int, int]:
        """(episode from 0, step within it from 0) of training step `step`, counted from 1."""
        return divmod(step - 1, self.steps_per_episode)

    def planned(self, step: int) -> list[int]:
        """The prompts of a step: the sampler's, with others in the place of resting ones."""
        planned, resting = self.sampler.indices(*self.place(step)), self.resting
        kept = [i for i in planned if i not in resting]
        return kept + self.more(step, 0, len(planned) - len(kept), kept)

    def more(self, step: int, turn: int, count: int, taken: Iterable[int]) -> list[int]:
        """Up to `count` prompts beside `taken` and the resting ones, in the order of `turn`."""
        return self.sampler.refill(*self.place(step), turn, count, {*taken, *self.resting})

    def sample(self, step: int, prompts: Sequence[int], first_group: int = 0) -> Finishing:
        """One group a prompt, numbered from first_group. Whoever stops early aborts what still runs."""
        chosen = [self.prompts[i] for i in prompts]
        finished = self.worker.as_finished(
            chosen, self.n, self.params, "rollout", step, first_group=first_group, greedy=self.greedy
        )
        with closing(finished):
            for done in finished:
                yield {
                    place: Group(prompts[place], tuple(row[: self.n]), row[self.n] if self.greedy else None)
                    for place, row in done
                }

    def counts(self) -> Mapping[str, int]:
        """What the engine has counted since it was made, evaluation included."""
        return self.worker.counts()

    @property
    def enough(self) -> bool:
        """Whether the prompts that are not retired fill a step."""
        return len(self.prompts) - len(self.retired) >= self.sampler.per_step

    @property
    def resting(self) -> frozenset[int]:
        """Prompts that no step samples. When fewer than a step needs are left, none rests any more."""
        return frozenset(self.retired if self.enough else ())

    def state_dict(self) -> dict[str, Any]:
        return {"retired": sorted(self.retired)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.retired = set(state["retired"])
