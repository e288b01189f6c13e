"""The train engine: forward, backward and optimizer of one model, on one rank or on several that train it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl.checkpoint.sharded import Piece
from verl.config.algorithm import UpdateConfig
from verl.config.models import OptimConfig
from verl.core.batch import Batch
from verl.core.errors import ConfigError
from verl.core.metrics import Metrics
from verl.core.protocols import Place
from verl.engines.train.holding import held, owned, share_of
from verl.engines.train.micro_batches import idle, split, tokens_at_once
from verl.engines.train.optimizer import MasterAdamW
from verl.models.packed import PackedInput
from verl.parallel.fsdp import release, shard
from verl.parallel.mesh import SINGLE, Mesh
from verl.parallel.parts import gathered, part
from verl.utils.flops import model_flops


@dataclass(frozen=True)
class Outputs:
    """What the model says of each token of a batch, [T], 0 where loss_mask is 0. entropy: [T], only where asked.

    values may be [T, K] for a forward that `infer` is given with width K.
    """

    values: Tensor
    entropy: Tensor | None = None


Forward = Callable[[PackedInput], Outputs]
Reduce = Callable[[list[Tensor]], None]
ScalarLoss = Callable[[Outputs, Batch], tuple[Tensor, Metrics]]
"""(outputs, micro-batch) -> (its share of the mini-batch's loss, metrics)."""


class EmbeddedTrainEngine:
    """One model in this process, or this rank's part of it. `forward` turns packed tokens into the column that this
    model is asked for.

    Without an optimizer config the engine is frozen: it infers only. head_params: weights of the output product, which
    only scored rows go through (they count in the reported FLOPs).

    mesh: the ranks that train the model together, each with its own sequences; every method but `place` and `shards` is
    called by all of them. Losses are divided by counts of all ranks, so gradients are added up over them. Where
    mesh.layout.fsdp is above 1 the module is sharded here, and every rank runs as many micro-batches as the busiest.
    over_tp: names of parameters of which tensor ranks hold different parts.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        update: UpdateConfig,
        device: str,
        optim: OptimConfig | None = None,
        total_steps: int = 1,
        name: str = "actor",
        share_prompt: bool = True,
        head_params: int = 0,
        mesh: Mesh = SINGLE,
        over_tp: Collection[str] = (),
    ):
        self.module, self.forward, self.device, self.name = module, forward, device, name
        self.mesh, self.over_tp = mesh, over_tp
        self.max_tokens = tokens_at_once(update, device)
        self.share_prompt = update.share_prompt and share_prompt
        module.requires_grad_(optim is not None)
        self.head_params = head_params
        self.body_params = sum(p.numel() for name, p in module.named_parameters() if p.ndim >= 2 and not _is_end(name))
        self.offloaded = _offloads(update, device, mesh)
        self._dtypes = shard(module, mesh, self.offloaded) if mesh.sharded else {}
        self.optimizer = MasterAdamW(module, optim, total_steps) if optim is not None else None
        self.skipped_steps = 0
        self._where: Place = "device"

    def _rounds(self, batch: Batch) -> list[list[int] | None]:
        """Sequence numbers of each micro-batch. None: this rank has nothing left, but gathers weights with others."""
        self._must_be_here()
        parts: list[list[int] | None] = [*split(batch, self.max_tokens, self.share_prompt)]
        most = self.mesh.most(len(parts)) if self.mesh.sharded else len(parts)
        return parts + [None] * (most - len(parts))

    @torch.no_grad()
    def infer(self, batch: Batch, forward: Forward | None = None, width: int | None = None) -> Tensor:
        """[T] float32 on the host: the model's column for every token; no gradient.

        forward: in place of the engine's own; the answer is [T, width] where it says several things of a token.
        """
        places = batch.per_seq(torch.arange(batch.num_tokens))
        out = torch.zeros(batch.num_tokens)
        for index in self._rounds(batch) or [None]:  # the shape of an answer is the model's, even of none
            mine = idle() if index is None else batch.take(index)
            values = (forward or self.forward)(PackedInput.of(mine, self.share_prompt, self.device)).values
            if values.ndim > out.ndim:
                out = out.new_zeros(batch.num_tokens, values.shape[1])
            if index is not None:
                out[torch.cat([places[i] for i in index])] = values.float().cpu()
        release(self.module)
        return out

    def forward_backward(self, batch: Batch, loss: ScalarLoss) -> Metrics:
        """Add the gradients of one mini-batch, part by part. The sum of parts is the mini-batch, however it is cut."""
        rounds = self._rounds(batch)
        return Metrics.merge([self._idle() if i is None else self._part(batch.take(i), loss) for i in rounds])

    def _part(self, part: Batch, loss: ScalarLoss) -> Metrics:
        packed = PackedInput.of(part, self.share_prompt, self.device)
        outputs = self.forward(packed)
        share, seen = loss(outputs, part.to(self.device))
        # Numbers are read before backward, so that the next part is packed while a GPU still works on this one.
        seen.sum(f"{self.name}/loss", float(share.detach()))
        if share.requires_grad:
            share.backward()
        elif self.mesh.sharded:  # others wait for this rank's backward
            (0.0 * outputs.values.sum()).backward()
        tokens, rows = len(packed.token_ids), len(packed.where)
        flops = model_flops(self.body_params, tokens, backward=True)
        flops += model_flops(self.head_params, rows, backward=True)
        return seen.sum(f"{self.name}/tokens", tokens).sum(f"{self.name}/flops", flops)

    def _idle(self) -> Metrics:
        """A micro-batch that adds zero to every gradient."""
        outputs = self.forward(PackedInput.of(idle(), self.share_prompt, self.device))
        (0.0 * outputs.values.sum()).backward()
        return Metrics()

    def optim_step(self) -> Metrics:
        """Clip to the norm, step, zero. A norm that is not finite never reaches the weights: counted and skipped, by
        all ranks alike, since all see the same norm.
        """
        assert self.optimizer is not None
        self._must_be_here()
        if not self.mesh.sharded:
            self.mesh.add_up(self.optimizer.grads, "replicate")
        norm = self.optimizer.grad_norm(self.mesh, self.over_tp)
        metrics = Metrics()
        finite = math.isfinite(norm)
        if finite:
            metrics.mean(f"{self.name}/grad_norm", norm, 1.0).mean(f"{self.name}/lr", self.optimizer.lr, 1.0)
            self.optimizer.step(min(1.0, self.optimizer.cfg.max_grad_norm / (norm + 1e-6)))
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad()
        counted = not finite and self.mesh.coord.dp == 0  # answers of data ranks are added up
        return metrics.sum(f"{self.name}/skipped_steps", float(counted))

    def shards(self) -> Mapping[str, Tensor]:
        """Named weights of this rank, in the dtype that computes; of a sharded model its parts, without empty ones."""
        named = {name: p.detach() for name, p in self.module.named_parameters()}
        if not self.mesh.sharded:
            return named
        mine = {name: part(p).to(self._dtypes[name]) for name, p in named.items()}
        return {name: p for name, p in mine.items() if p.numel()}

    def gathered(self) -> dict[str, Tensor]:
        """Whole weights of a sharded model by name, in the dtype that computes, on the host of the first rank; {} on
        others, and where the module has them whole itself. All ranks call it.
        """
        if self.over_tp:
            raise ConfigError(f"tp: tensor ranks hold parts of the {self.name}, which cannot be gathered; set tp to 1")
        if not self.mesh.sharded:
            return {}
        release(self.module)
        out: dict[str, Tensor] = {}
        for name, p in self.module.named_parameters():
            out |= {n: w.to(self._dtypes[n]) for n, w in gathered({name: p.detach()}, self.mesh.first).items()}
        return out

    def place(self, where: Place) -> None:
        """Where weights, masters and moments are. `host`: out of device memory. `released`: on the device, without
        gradient buffers, which `host` does without as well. On a CPU, and where they are offloaded, nothing else moves.

        A rollout engine that reads the module's own storage cannot generate while it is on the host.
        """
        if where == self._where:
            return
        if self.optimizer is not None:
            self.optimizer.free_grads()
        if self.device != "cpu" and not self.offloaded and "host" in (where, self._where):
            self._moved(lambda x: x.to("cpu" if where == "host" else self.device))
        if self.optimizer is not None and where == "device":
            self.optimizer.take_grads()
        self._where = where

    def _moved(self, move: Callable[[Tensor], Tensor]) -> None:
        self.module._apply(move)
        if self.optimizer is not None:
            self.optimizer.moved(move)

    def _must_be_here(self) -> None:
        if self._where != "device":
            raise RuntimeError(f"the {self.name} is placed on {self._where!r}; call place('device') first")

    def pieces(self) -> dict[str, Piece]:
        """Masters and moments as they lie here, by KIND/NAME; {} of a frozen engine."""
        return {f"{kind}/{name}": piece for kind, name, piece in self._pieces()}

    def owned_pieces(self) -> dict[str, Piece]:
        """Those parts of `pieces` that this rank saves."""
        share = share_of(self.module)
        return {f"{kind}/{name}": owned(name, piece, share) for kind, name, piece in self._pieces()}

    def _pieces(self) -> Iterator[tuple[str, str, Piece]]:
        if self.optimizer is None:
            return
        params, share = dict(zip(self.optimizer.names, self.optimizer.params, strict=True)), share_of(self.module)
        for kind, tensors in self.optimizer.state().items():
            for name, tensor in tensors.items():
                yield kind, name, Piece(tensor, *held(name, params[name], share))

    def counters(self) -> dict[str, int]:
        """The rest of what the next step depends on, the same on all ranks."""
        return {"steps": 0 if self.optimizer is None else self.optimizer.steps, "skipped_steps": self.skipped_steps}

    def load(self, counters: Mapping[str, int], read: Callable[[Mapping[str, Piece]], None]) -> None:
        """Restore all of it. read: fills the tensors of `pieces`."""
        assert self.optimizer is not None
        release(self.module)
        self.optimizer.restart(counters["steps"])
        read(self.pieces())
        self.optimizer.sync()
        self.skipped_steps = counters["skipped_steps"]


def _offloads(update: UpdateConfig, device: str, mesh: Mesh) -> bool:
    """Whether parts lie on the host. On a CPU there is no other place, so the option changes nothing."""
    if not update.cpu_offload or device == "cpu":
        return False
    if not mesh.sharded:
        raise ConfigError(
            "update.cpu_offload: only a model that is sharded over ranks (fsdp above 1) is offloaded; set it to false"
        )
    return True


def _is_end(name: str) -> bool:
    """Whether a parameter is an embedding or an output head: looked up, or applied to scored rows only."""
    return "embed" in name or name.startswith(("lm_head.", "score."))
