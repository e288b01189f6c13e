"""How many bytes of training state a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from verl.engines.train.engine import EmbeddedTrainEngine
from verl.parallel.parts import part

KINDS = ("weights", "gradients", "optimizer")


def state_bytes(engine: EmbeddedTrainEngine) -> dict[str, int]:
    """Bytes of this rank's storage by KINDS, each storage counted once. The optimizer's are moments and the masters
    that are no weights themselves. What is gathered while a layer runs, and activations, are not among them.
    """
    optimizer, seen = engine.optimizer, set[int]()
    assert optimizer is not None, "a frozen engine trains nothing"
    kinds = (engine.module.parameters(), optimizer.grads, [*optimizer.masters, *optimizer.moments])
    return {name: _fresh(tensors, seen) for name, tensors in zip(KINDS, kinds, strict=True)}


def _fresh(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of storages that are not in `seen`, which they join."""
    total = 0
    for tensor in tensors:
        storage = part(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
