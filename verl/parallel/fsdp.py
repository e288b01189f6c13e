"""Fully sharded data parallelism (FSDP2, `torch.distributed.fsdp.fully_shard`) of a model.

A rank keeps its part of each fp32 parameter, of its gradient and of its moments; the parameter is the optimizer's
master. A layer's weights are gathered in the dtype that computes just before the layer runs, and its gradients are
added up in fp32 over the ranks just after: added, not averaged, since losses here are divided by counts of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from verl.core.errors import ConfigError, ModelError
from verl.parallel.mesh import Mesh

FP32 = torch.float32


@runtime_checkable
class Layered(Protocol):
    """A model that can be sharded. entry: the method that runs it; from its start to the end of backward the weights
    outside of layers are whole, so that a head may read them after it.
    """

    entry: str

    def layers(self) -> Sequence[nn.Module]:
        """The modules whose weights are gathered one after the other; each is run by its own forward."""


@runtime_checkable
class Repeats(Protocol):
    """A model that runs its layers several times in one call of its entry.

    agree: from the times that this rank needs to the times that all ranks run, which is the highest of them.
    """

    agree: Callable[[int], int]


def shard(module: nn.Module, mesh: Mesh, offload: bool = False) -> dict[str, torch.dtype]:
    """Cut the parameters of `module` over mesh's data axis; those that train become fp32. Returns each one's dtype
    before that, which is the one it computes in.

    offload: parts lie on the host, and so do gradients and the optimizer. ConfigError: the model does not say what its
    layers are, or torch is too old.
    """
    if not isinstance(module, Layered):
        raise ConfigError(f"fsdp: {type(module).__name__} does not say which layers it has; set fsdp to 1")
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ConfigError(f"fsdp: torch {torch.__version__} only averages gradients; install torch 2.9 or newer")
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    layers = list(module.layers())
    inside, main = {m for layer in layers for m in layer.modules()}, _dtype(layers[0])
    for layer in layers:
        _cut(layer, mesh, offload, free_after_forward=True)
    for other in [m for m in module.modules() if m not in inside and m is not module]:
        if any(p.dtype != main for p in other.parameters(recurse=False)):
            _cut(other, mesh, offload, free_after_forward=True)  # run by its own forward, in its own dtype
    _cut(module, mesh, offload, free_after_forward=False)
    register_fsdp_forward_method(module, module.entry)
    if isinstance(module, Repeats):
        module.agree = mesh.most
    return dtypes


def release(module: nn.Module) -> None:
    """Let go of weights outside of layers, which a pass without backward leaves whole. Nothing where not sharded."""
    if isinstance(module, FSDPModule):
        module.reshard()


def _cut(module: nn.Module, mesh: Mesh, offload: bool, free_after_forward: bool) -> None:
    """One group: all parameters of `module` that are in no group yet."""
    dtype = _dtype(module)
    for p in _own(module):
        if p.requires_grad:
            p.data = p.data.to(FP32)
    sharded = fully_shard(
        module,
        mesh=mesh.data_axes(),
        reshard_after_forward=free_after_forward,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other, and nothing is left to divide


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that no inner group has taken."""
    taken = {p for m in module.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    return [p for p in module.parameters() if p not in taken]


def _dtype(module: nn.Module) -> torch.dtype:
    """The one dtype of a group. ModelError where there are more."""
    own = {p.dtype for p in _own(module)}
    if len(own) > 1:
        raise ModelError(
            f"fsdp: {type(module).__name__} mixes weights of {', '.join(sorted(map(str, own)))}, which are gathered "
            "together; set fsdp to 1"
        )
    return own.pop() if own else FP32
