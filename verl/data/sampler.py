"""The order of prompts: a pure function of (seed, episode, step), so a resumed run needs no state but these numbers."""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache

from verl.core import DataError
from verl.core.rng import stream


class PromptSampler:
    """Which prompts each step samples.

    num_prompts: size of the data. per_step: prompts a step. An episode is a pass over the data without repetition; the
    num_prompts % per_step prompts at the end of its order are left for other episodes' orders.
    """

    def __init__(self, num_prompts: int, per_step: int, seed: int, shuffle: bool = True):
        if num_prompts < per_step:
            raise DataError(
                f"the data has {num_prompts} training prompts, fewer than trainer.prompts_per_step={per_step}; "
                "lower it, or give more data (data.size, data.eval_size, data.max_prompt_tokens)"
            )
        self.num_prompts = num_prompts
        self.per_step = per_step
        self.seed = seed
        self.shuffle = shuffle

    @property
    def steps_per_episode(self) -> int:
        """Full steps in a pass over the data."""
        return self.num_prompts // self.per_step

    def indices(self, episode: int, step: int) -> list[int]:
        """Indices of the prompts of a step; both are counted from 0."""
        assert 0 <= step < self.steps_per_episode, f"step {step} of {self.steps_per_episode}"
        start = step * self.per_step
        if not self.shuffle:
            return list(range(start, start + self.per_step))
        return list(_order(self.num_prompts, self.seed, episode)[start : start + self.per_step])

    def refill(self, episode: int, step: int, turn: int, count: int, taken: Container[int]) -> list[int]:
        """Up to `count` prompts that are not in `taken`: the first ones of an own order of (episode, step, turn).

        Fewer come back where the data has no more. The order is drawn with shuffle off as well.
        """
        order = stream(self.seed, "data.refill", episode, step, turn).permutation(self.num_prompts)
        return [i for i in order.tolist() if i not in taken][:count]


@lru_cache(maxsize=4)
def _order(num_prompts: int, seed: int, episode: int) -> tuple[int, ...]:
    return tuple(int(i) for i in stream(seed, "data.order", episode).permutation(num_prompts))
