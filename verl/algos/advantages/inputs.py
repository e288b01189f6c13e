"""What an advantage estimator reads, what it returns, and where it is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algos.segments import Segments
from verl.core.registry import Registry


@dataclass(frozen=True)
class CreditInputs:
    """The columns of a batch. A sample without a counted token (excluded, rejected) is in nobody's statistics.

    rewards [T]: token rewards. group [N]: prompt of a sample. The rest is there only where the entry `needs` it:
    values [T]: the critic's. greedy_reward [N]: score of the prompt's greedy response. reward_parts [N, K] and
    reward_weights [N, K]: components of the reward, unweighted, and their weights. old_logprobs [T]: of the policy
    before the update; sum_pi_squared [T]: sum over the vocabulary of its squared probabilities.
    """

    segments: Segments
    rewards: Tensor
    group: Tensor
    values: Tensor | None = None
    greedy_reward: Tensor | None = None
    reward_parts: Tensor | None = None
    reward_weights: Tensor | None = None
    old_logprobs: Tensor | None = None
    sum_pi_squared: Tensor | None = None


Credit = tuple[Tensor, Tensor | None]
"""(advantages [T], returns [T] or None); both 0 where the mask is 0."""
ADVANTAGES: Registry[Callable[..., Credit]] = Registry("algorithm.advantage")


@dataclass(frozen=True)
class Groups:
    """Statistics over the counted samples of each prompt. place [N]: group number of a sample; counted [N] bool."""

    place: Tensor
    counted: Tensor
    number: int

    @classmethod
    def of(cls, group: Tensor, counted: Tensor) -> Groups:
        place = torch.unique(group, return_inverse=True)[1]
        return cls(place, counted, int(place.max()) + 1 if len(place) else 0)

    def sum(self, x: Tensor) -> Tensor:
        """[N] -> [G] over counted samples."""
        kept = torch.where(self.counted, x, torch.zeros((), dtype=x.dtype, device=x.device))
        return torch.zeros(self.number, dtype=x.dtype, device=x.device).index_add(0, self.place, kept)

    def size(self, dtype: torch.dtype) -> Tensor:
        """[G] counted samples."""
        return self.sum(torch.ones_like(self.place, dtype=dtype))

    def mean(self, x: Tensor) -> Tensor:
        """[N] -> [N] mean of the sample's group; 0 in a group of one."""
        return torch.where(self.alone(), torch.zeros_like(x), self._mean(x))

    def std(self, x: Tensor) -> Tensor:
        """[N] -> [N] unbiased standard deviation of the sample's group; 1 in a group of one."""
        n = self.size(x.dtype)
        std = (self.sum((x - self._mean(x)) ** 2) / (n - 1).clamp(min=1)).sqrt()[self.place]
        return torch.where(self.alone(), torch.ones_like(std), std)

    def alone(self) -> Tensor:
        """[N] bool: nothing to compare with, the sample's group has fewer than two counted samples."""
        return self.size(torch.int64)[self.place] < 2

    def top_two(self, x: Tensor, absent: float) -> tuple[Tensor, Tensor]:
        """[N] -> ([G] largest, [G] second largest: the same in a tie). `absent`, below all x, stands for no sample."""
        first = self._largest(x, self.counted, absent)
        at_top = x == first[self.place]
        tied = self.sum(at_top.long()) > 1
        return first, torch.where(tied, first, self._largest(x, self.counted & ~at_top, absent))

    def _mean(self, x: Tensor) -> Tensor:
        """[N] -> [N]. Taken as distance from the group's largest, so that equal values give exactly that value."""
        top = self._largest(x, self.counted, -torch.inf)[self.place]
        return top + (self.sum(x - top) / self.size(x.dtype).clamp(min=1))[self.place]

    def _largest(self, x: Tensor, kept: Tensor, absent: float) -> Tensor:
        floor = torch.full((self.number,), absent, dtype=x.dtype, device=x.device)
        return floor.scatter_reduce(0, self.place, torch.where(kept, x, absent), "amax")
