"""The whole of a model that several processes hold in parts, on the host of the first of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from verl.core.errors import ModelError
from verl.models.policy import Policy
from verl.parallel.axes import Axis, PipelineParallel


def is_writer(policy: Policy) -> bool:
    """Whether this process is the first of all that hold parts of the policy."""
    axes = (policy.decoder.tp, policy.decoder.pp)
    return all(axis is None or axis.first for axis in axes)


def whole_tensors(policy: Policy, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every weight by name, whole, on the host of the first process; {} on the others. All of them call this.

    tensors: this process's parts, by the names of the policy's parameters (or masters, an average ... of these).
    """
    decoder, device = policy.decoder, next(policy.parameters()).device
    mine = {}
    for name, _ in policy.named_parameters():
        tensor = _joined(policy, name, tensors[name].detach().to(device))
        if tensor is not None:
            mine[name] = tensor
    if decoder.pp is None or not (decoder.tp is None or decoder.tp.first):
        return mine
    return _from_stages(mine, decoder.pp, next(policy.parameters()).device)


def all_succeeded(policy: Policy, failed: bool, what: str) -> None:
    """ModelError on the others where the first process has failed; they wait until it knows."""
    flag = torch.tensor(float(failed), device=next(policy.parameters()).device)
    decoder = policy.decoder
    axes: tuple[Axis | None, ...] = (decoder.tp, decoder.pp)
    for axis, concerned in zip(axes, (decoder.stage.first, True), strict=True):
        if axis is not None and concerned:
            dist.broadcast(flag, group=axis.group, group_src=0)
    if float(flag) and not failed:
        raise ModelError(f"{what}: the process that writes it has failed; its message says why")


def _joined(policy: Policy, name: str, local: Tensor) -> Tensor | None:
    """A weight whole on the host of tensor-parallel rank 0; None on the others."""
    tp, cuts = policy.decoder.tp, policy.decoder.share.cuts
    part = policy.decoder.share.part(name)
    if tp is None or cuts is None or part is None:
        return local.cpu() if tp is None or tp.first else None
    if not tp.first:
        own = cuts.owned(name, local, tp.rank)
        if own.numel():
            dist.send(own.contiguous(), group=tp.group, group_dst=0)
        return None
    whole = local.new_empty(part.whole_shape(local.shape))
    part.of(whole).copy_(local)
    for rank in range(1, tp.size):
        theirs = cuts.owned_part(name, rank)
        assert theirs is not None
        if theirs.stop > theirs.start:
            buffer = torch.empty_like(theirs.of(whole), memory_format=torch.contiguous_format)
            dist.recv(buffer, group=tp.group, group_src=rank)
            theirs.of(whole).copy_(buffer)
    return whole.cpu()


def _from_stages(mine: dict[str, Tensor], pp: PipelineParallel, device: torch.device) -> dict[str, Tensor]:
    """The tensors of all stages, in the first one."""
    if not pp.first:  # a tied embedding is in the first stage too
        kept = {name: tensor for name, tensor in mine.items() if "embed_tokens" not in name}
        dist.send_object_list([[(n, t.shape, t.dtype) for n, t in kept.items()]], group=pp.group, group_dst=0)
        for tensor in kept.values():
            dist.send(tensor.to(device), group=pp.group, group_dst=0)
        return {}
    for stage in range(1, pp.size):
        told: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]]
        dist.recv_object_list(told, group=pp.group, group_src=stage)
        for name, shape, dtype in told[0]:
            buffer = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(buffer, group=pp.group, group_src=stage)
            mine[name] = buffer.cpu()
    return mine
