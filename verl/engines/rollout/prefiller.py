"""Prompts into slots of the cache: the forwards that do it, and what need not be computed again.

That is one whole prompt, kept for its other samples, and the beginnings that the prefix cache has.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.engines.rollout.attend import PrefillAttention
from verl.engines.rollout.cache import Prefix, SlotCache
from verl.engines.rollout.prefill import PrefillPlan, Tokens, plan_prefill
from verl.engines.rollout.prefix_cache import PrefixCache
from verl.engines.rollout.scheduler import Unit
from verl.engines.rollout.stats import Stats
from verl.models.attention import PackedAttention
from verl.models.kernels import Kernels
from verl.models.plan import Plan

Body = Callable[[Tensor, Tensor, Any], Tensor]
"""(token_ids [P], position_ids [P], attend) -> hidden states [P, F]."""


class Prefiller:
    """Computes the keys, values and last features of prompts. window: per layer, as in DecoderConfig; kernels: of the
    policy."""

    def __init__(
        self,
        cache: SlotCache,
        prefixes: PrefixCache,
        window: Callable[[int], int | None],
        device: torch.device,
        stats: Stats,
        kernels: Kernels | None = None,
    ):
        self._kernels = kernels
        self._cache, self._window, self._device, self._stats = cache, window, device, stats
        self._prefixes = prefixes
        self._kept: Prefix | None = None

    def cost(self, tokens: Tokens) -> int:
        """Tokens that a prefill of these must compute."""
        if self._kept is not None and self._kept.tokens == tokens:
            return 0
        return len(tokens) - self._prefixes.reusable(tokens)

    def units(self, body: Body, units: Sequence[Unit], slots: Sequence[slice]) -> Tensor:
        """[U, F] features of each unit's last token, its keys and values written to its slots."""
        rows: dict[int, Tensor] = {}
        whole, begun = [], {}
        for i, unit in enumerate(units):
            if self._kept is not None and unit.tokens == self._kept.tokens:
                self._cache.start_from(self._kept, slots[i])
                rows[i] = self._kept.features
            elif at := self.start(unit.tokens, slots[i]):
                begun[i] = at
            else:
                whole.append(i)
        if whole or begun:
            plan = plan_prefill([units[i].tokens for i in whole], [slots[i] for i in whole])
            for i, at in begun.items():
                plan.add_part(units[i].tokens[at:], slots[i], at)
            rows.update(zip((*whole, *begun), self._forward(body, plan), strict=True))
        features_UF = torch.stack([rows[i] for i in range(len(units))])
        self.keep(units[-1].tokens, units[-1].more, slots[-1].start, features_UF[-1])
        return features_UF

    def start(self, tokens: Tokens, slots: slice) -> int:
        """How many of the tokens, the first ones, the prefix cache has put into each of these slots."""
        at = self._prefixes.start(tokens, slots)
        self._stats.reused_tokens += at
        return at

    def chunk(self, body: Body, tokens: Tokens, slot: int, at: int) -> Tensor:
        """[1, F] features of the last of these tokens, which follow the first `at` tokens of the slot."""
        plan = plan_prefill([], [])
        plan.add_part(tokens, slice(slot, slot + 1), at)
        return self._forward(body, plan)

    def keep(self, tokens: Tokens, more: bool, slot: int, features: Tensor) -> None:
        """Where more sequences with these tokens wait, they will start from a copy of the keys in this slot.

        Only the last unit of a prefill can have members left over, so one copy is enough.
        """
        if not more:
            self._kept = None
        elif self._kept is None or self._kept.tokens != tokens:
            self._kept = self._cache.prefix(slot, tokens, features.clone())

    def forget(self, waiting: Container[Tokens] = ()) -> None:
        """Drop the kept prompt, unless it is in `waiting`."""
        if self._kept is not None and self._kept.tokens not in waiting:
            self._kept = None

    def _forward(self, body: Body, plan: PrefillPlan) -> Tensor:
        """[U, F] features of the last token of each prompt, computed in one packed forward."""
        inner = PackedAttention(Plan.of(plan.blocks, self._device), self._window, self._kernels)
        hidden = body(
            torch.tensor(plan.token_ids, device=self._device),
            torch.tensor(plan.positions, device=self._device),
            PrefillAttention(inner, self._cache, plan),
        )
        self._stats.prefilled_tokens += len(plan.token_ids)
        return hidden[torch.tensor(plan.last, device=self._device)]
