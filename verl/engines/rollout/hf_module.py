"""A transformers module over the parameters of any policy, without a second copy of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM


def module_of(policy: Any) -> Any:
    """The policy's own transformers module, or one made around a native policy's parameters."""
    return policy.module if policy.implementation == "transformers" else _around(policy)


def _around(policy: Any) -> Any:
    """Build the architecture on the meta device, then put the policy's parameters in by name.

    A native policy names its parameters as the checkpoint does, so the names are those of the transformers module.
    """
    parameters = dict(policy.named_parameters())
    some = next(iter(parameters.values()))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(policy.source.hf_config(), dtype=some.dtype)
    for name, parameter in parameters.items():
        _put(module, name, parameter)
    module.tie_weights()
    _fill_buffers(module, some.device)
    homeless = [name for name, p in module.named_parameters() if p.is_meta]
    assert not homeless, f"the policy has no parameter for {homeless}"
    return module.eval()


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    home = module.get_submodule(owner)
    assert leaf in home._parameters, f"transformers has no parameter {name!r}"
    home._parameters[leaf] = parameter


def _fill_buffers(module: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies), which the meta device left empty."""
    for part in module.modules():
        empty = {name: b for name, b in part._buffers.items() if b is not None and b.is_meta}
        for name, buffer in empty.items():
            part._buffers[name] = torch.empty_like(buffer, device=device)
        if empty:
            module._init_weights(part)
