"""Named weights into a module's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from verl.core.errors import ModelError
from verl.models.cuts import Share

_DERIVED = re.compile(r".*rotary_emb\.inv_freq")
"""Written by old checkpoints, computed by every reader."""


@torch.no_grad()
def fill(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    name: str,
    ignore: str | None = None,
    optional: tuple[str, ...] = (),
    share: Share | None = None,
) -> None:
    """Copy weights by name into the parameters of `module`, cast to their dtype.

    ignore: pattern of further names that may come and are not needed. optional: parameters that may stay as they are.
    share: that the module and the tensors are of.
    ModelError names a weight that is missing, unknown or of another shape; `name` is the model's, for the message.
    """
    params = dict(module.named_parameters())
    missing = set(params) - set(optional)
    for key, tensor in tensors:
        if key in params:
            if tensor.shape != params[key].shape:
                part = None if share is None else share.part(key)
                have, want = (tuple(t.shape) for t in (tensor, params[key]))
                raise ModelError(
                    f"{name}: weight {key!r} has shape {have}, its config says "
                    f"{want if part is None else part.whole_shape(want)}; weights and config.json do not belong "
                    "together"
                )
            params[key].copy_(tensor)
            missing.discard(key)
        elif not _DERIVED.fullmatch(key) and not (ignore and re.fullmatch(ignore, key)):
            raise ModelError(f"{name}: weight {key!r} has no place in this architecture; check its config.json")
    if missing:
        raise ModelError(
            f"{name}: weight {min(missing)!r} is missing ({len(missing)} in all); point the path at a complete model"
        )
