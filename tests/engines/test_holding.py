"""Where a parameter's part lies in the whole: tensor ranks, key heads that several hold, and FSDP inside of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.checkpoint.simulated import everything, save_as_ranks
from tests.parallel.test_cuts import shape
from verl.checkpoint.sharded import Piece, load
from verl.engines.train.holding import Holding, share_of
from verl.models.cuts import Cuts, Share, Stage, chunk
from verl.models.policy import Policy

FSDP = 3


def as_rank(local: torch.Tensor, rank: int) -> tuple[DTensor, torch.Tensor]:
    """A parameter that FSDP cut, as this rank has it, and its own part; no other rank is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=FSDP)
    mesh = DeviceMesh("cpu", list(range(FSDP)))
    mine = local[slice(*chunk(len(local), FSDP, rank))].contiguous()
    cut = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=local.shape, stride=local.stride())
    dist.destroy_process_group()
    return cut, mine


@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 2, 2), (9, 3, 4), (8, 1, 3), (4, 2, 1)])
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_model_in_parts_is_the_model(tmp_path, heads: int, keys: int, size: int, fsdp: bool) -> None:
    """Every (tensor, FSDP) rank saves what it owns: whole again it is the model, and each gets back what it had."""
    config = shape(heads, keys, inner=50, vocab=301)
    cuts = Cuts(config, size)
    named = dict(Policy(config, None).named_parameters())  # type: ignore[arg-type]
    full = {name: torch.randn(p.shape) for name, p in named.items()}
    saved, held_by = [], []
    for tp_rank in range(size):
        share = Share(Stage(0, 1, config.num_layers), cuts if size > 1 else None, tp_rank, config.tied)
        holding = Holding(share)
        for rank in range(FSDP if fsdp else 1):
            mine: dict[str, Piece] = {}
            owned: dict[str, Piece] = {}
            for name, values in full.items():
                part = share.part(name)
                local = values if part is None else part.of(values).contiguous()
                cut, own = as_rank(local, rank) if fsdp else (local, local)
                mine[name] = Piece(own, holding.box(name, cut), holding.shape(name, cut))
                own = own[holding.own(name, cut)] if own.numel() else own
                owned[name] = Piece(own, holding.owned(name, cut), values.shape)
                assert mine[name].shape == values.shape
            held_by.append(mine)
            saved.append(owned)
    save_as_ranks(tmp_path, saved)
    back = everything(tmp_path)
    assert back.keys() == full.keys() and all(torch.equal(back[n], full[n]) for n in full)
    for mine in held_by:
        again = {n: replace(p, tensor=torch.zeros_like(p.tensor)) for n, p in mine.items()}
        load(tmp_path, again, complete=True)
        assert all(torch.equal(again[n].tensor, mine[n].tensor) for n in mine)


def test_the_share_is_the_decoder_s() -> None:
    policy = Policy(shape(), None)  # type: ignore[arg-type]
    assert share_of(policy) is policy.decoder.share
    assert share_of(torch.nn.Linear(2, 2)) is None
