"""What each rank is given beside the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.controller.dispatch import Dispatch
from verl.controller.partition import Parts, Splits
from verl.parallel.layout import Layout


def arguments(
    dispatch: Dispatch, layout: Layout, kwargs: Mapping[str, Any], parts: Parts | None
) -> dict[int, dict[str, Any]]:
    """Arguments of every rank that runs. parts: of the batch, None for a call without one.

    What is about sequences (`Splits`) is cut with the batch; of a per_rank call each rank gets its own value of every
    argument; anything else goes to all.
    """
    running = dispatch.running(layout)
    if dispatch.gives == "per_rank":
        wrong = [name for name, value in kwargs.items() if len(value) != layout.world]
        if wrong:
            raise ValueError(f"{wrong[0]}: {dispatch.name} takes one value a rank, {layout.world} in all")
        return {r: {name: value[r] for name, value in kwargs.items()} for r in running}
    if dispatch.gives == "whole" or parts is None:
        return {r: dict(kwargs) for r in running}
    cut = {name: value.split(parts) if isinstance(value, Splits) else None for name, value in kwargs.items()}

    def mine(name: str, part: int) -> Any:
        own = cut[name]
        return kwargs[name] if own is None else own[part]

    return {r: {name: mine(name, dispatch.part_of(r, layout)) for name in kwargs} for r in running}
