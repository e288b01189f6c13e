"""The train engine: forward, backward and optimizer of one model, on one rank or on several that train it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from verl.engines.train.holding import Holding, hidden_size, is_tied
from verl.engines.train.micro_batches import idle, split, tokens_at_once
from verl.engines.train.optimizer import MasterAdamW
from verl.models.packed import PackedInput
from verl.parallel.fsdp import release, shard
from verl.parallel.mesh import SINGLE, Mesh
from verl.parallel.parts import gathered, part
from verl.parallel.pipeline import Pipeline
from verl.utils.flops import model_flops
from verl.weights.boxes import numel


@dataclass(frozen=True)
class Outputs:
    """What the model says of each token of a batch, [T], 0 where loss_mask is 0. entropy: [T], only where asked.

    values may be [T, K] for a forward that `infer` is given with width K.
    """

    values: Tensor
    entropy: Tensor | None = None


Move = Callable[[Tensor], Tensor]
Forward = Callable[..., Outputs]
"""(packed tokens) -> the column that a model is asked for; in the last stage of a pipeline (packed tokens, hidden
states that the stage before gave)."""
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
    Tensor ranks and pipeline stages get the same sequences; the module has been cut over them when it was made, and
    the method that module.entry names runs a stage.
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
    ):
        self.module, self.forward, self.device, self.name = module, forward, device, name
        self.mesh, self.holding = mesh, Holding.of(module)
        self.max_tokens = tokens_at_once(update, device)
        self.share_prompt = update.share_prompt and share_prompt
        module.requires_grad_(optim is not None)
        self.head_params = head_params
        self.body_params = self._body_params()
        self.pipeline = _pipeline(module, mesh, device)
        self.offloaded = _offloads(update, device, mesh)
        self._dtypes = shard(module, mesh, self.offloaded) if mesh.sharded else {}
        self.optimizer = MasterAdamW(module, optim, total_steps) if optim is not None else None
        self.skipped_steps = 0
        self._where: Place = "device"

    def _rounds(self, batch: Batch) -> list[list[int] | None]:
        """Sequence numbers of each micro-batch. None: this rank has nothing left, but gathers weights with others."""
        parts: list[list[int] | None] = [*split(batch, self.max_tokens, self.share_prompt)]
        most = self.mesh.most(len(parts)) if self.mesh.sharded else len(parts)
        return parts + [None] * (most - len(parts))

    def _body_params(self) -> int:
        """Weights of products in all stages and tensor ranks, but for embeddings and heads."""
        named = [(n, p) for n, p in self.module.named_parameters() if p.ndim >= 2 and not _is_end(n)]
        mine = sum(numel(self.holding.owned(n, p)) for n, p in named)
        return int(self.mesh.sum(torch.tensor(mine, dtype=torch.int64), "pp", "tp"))

    @torch.no_grad()
    def infer(self, batch: Batch, forward: Forward | None = None, width: int | None = None) -> Tensor:
        """[T] float32 on the host: the model's column for every token; no gradient.

        forward: in place of the engine's own; the answer is [T, width] where it says several things of a token.
        """
        self._must_be_here(state=False)
        places = batch.per_seq(torch.arange(batch.num_tokens))
        out = torch.zeros(batch.num_tokens, *([] if width is None else [width]))
        rounds = self._rounds(batch)
        for index, values in zip(rounds, self._inferred(batch, rounds, forward or self.forward), strict=False):
            if index is not None:
                out[torch.cat([places[i] for i in index])] = values.float().cpu()
        release(self.module)
        return out if self.pipeline is None else self.pipeline.from_last(out.to(self.device)).cpu()

    def _inferred(self, batch: Batch, rounds: Sequence[list[int] | None], forward: Forward) -> Iterator[Tensor]:
        """What the model says of each micro-batch, in order; nothing in stages that are not the last."""
        packed = [PackedInput.of(self._of(batch, index), self.share_prompt, self.device) for index in rounds]
        if self.pipeline is None:
            for some in packed:
                yield forward(some).values
        else:
            run = self._stage(packed, lambda i, hidden: forward(packed[i], hidden).values)
            yield from self.pipeline.infer(self._shapes(packed), run)

    def forward_backward(self, batch: Batch, loss: ScalarLoss) -> Metrics:
        """Add the gradients of one mini-batch, part by part. The sum of parts is the mini-batch, however it is cut."""
        self._must_be_here()
        rounds = self._rounds(batch)
        if self.pipeline is not None:
            return self._pipelined(self.pipeline, batch, rounds, loss)
        seen = []
        for index in rounds:
            part = self._of(batch, index)
            packed = PackedInput.of(part, self.share_prompt, self.device)
            share, metrics = self._loss(packed, None if index is None else part, None, loss)
            if share.requires_grad:
                share.backward()
            seen.append(metrics)
        return Metrics.merge(seen)

    def _pipelined(
        self, pipeline: Pipeline, batch: Batch, rounds: Sequence[list[int] | None], loss: ScalarLoss
    ) -> Metrics:
        """The same through all stages; metrics are of the last one."""
        parts = [self._of(batch, index) for index in rounds]
        packed = [PackedInput.of(part, self.share_prompt, self.device) for part in parts]
        seen = [Metrics()]

        def last(i: int, hidden: Tensor | None) -> Tensor:
            share, metrics = self._loss(packed[i], None if rounds[i] is None else parts[i], hidden, loss)
            seen.append(metrics)
            return share

        pipeline.forward_backward(self._shapes(packed), self._stage(packed, last))
        return Metrics.merge(seen)

    def _stage(
        self, packed: Sequence[PackedInput], last: Callable[[int, Tensor | None], Tensor]
    ) -> Callable[[int, Tensor | None], Tensor]:
        """What this stage does with micro-batch i. last: in the last stage."""
        assert self.pipeline is not None
        if self.pipeline.axis.last:
            return last
        entry = getattr(self.module, str(self.module.entry))
        return lambda i, hidden: entry(packed[i], hidden)

    def _shapes(self, packed: Sequence[PackedInput]) -> list[tuple[int, int]]:
        width = hidden_size(self.module)
        return [(len(some.token_ids), width) for some in packed]

    def _of(self, batch: Batch, index: list[int] | None) -> Batch:
        return idle() if index is None else batch.take(index)

    def _loss(
        self, packed: PackedInput, part: Batch | None, hidden: Tensor | None, loss: ScalarLoss
    ) -> tuple[Tensor, Metrics]:
        """A micro-batch's share of the loss; of none (part is None) zero, with a gradient of zero for all."""
        outputs = self.forward(packed) if hidden is None else self.forward(packed, hidden)
        nothing = 0.0 * outputs.values.sum()
        if part is None:
            return nothing, Metrics()
        share, seen = loss(outputs, part.to(self.device))
        # Numbers are read before backward, so that the next part is packed while a GPU still works on this one.
        seen.sum(f"{self.name}/loss", float(share.detach()))
        if not share.requires_grad and (self.mesh.sharded or self.pipeline is not None):
            share = share + nothing  # others wait for this rank's backward
        tokens, rows = len(packed.token_ids), len(packed.where)
        flops = model_flops(self.body_params, tokens, backward=True)
        flops += model_flops(self.head_params, rows, backward=True)
        return share, seen.sum(f"{self.name}/tokens", tokens).sum(f"{self.name}/flops", flops)

    def optim_step(self) -> Metrics:
        """Clip to the norm, step, zero. A norm that is not finite never reaches the weights: counted and skipped, by
        all ranks alike, since all see the same norm.
        """
        assert self.optimizer is not None
        self._must_be_here()
        self._add_tied()
        if not self.mesh.sharded:
            self.mesh.add_up(self.optimizer.grads, "replicate")
        norm = self.optimizer.grad_norm(self.mesh, self.holding)
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

    def _add_tied(self) -> None:
        """An embedding that the last stage uses as its head: both copies get the gradient of both uses."""
        if self.pipeline is not None and is_tied(self.module):
            assert self.optimizer is not None
            grads = dict(zip(self.optimizer.names, self.optimizer.grads, strict=True))
            ends = next((g for name, g in grads.items() if "embed_tokens" in name), None)
            if ends is not None:
                self.pipeline.sum_ends(ends)

    def shards(self) -> Mapping[str, Tensor]:
        """Named weights of this rank, in the dtype that computes; of a sharded model its parts, without empty ones."""
        named = {name: p.detach() for name, p in self.module.named_parameters()}
        if not self.mesh.sharded:
            return named
        mine = {name: part(p).to(self._dtypes[name]) for name, p in named.items()}
        return {name: p for name, p in mine.items() if p.numel()}

    def gathered(self) -> dict[str, Tensor]:
        """Weights without FSDP's cuts by name, in the dtype that computes, on the hosts of the first data rank; {} on
        others, and where the module is not sharded. Stages and tensor ranks have their parts. All ranks call it.
        """
        if not self.mesh.sharded:
            return {}
        release(self.module)
        out: dict[str, Tensor] = {}
        keep = self.mesh.coord.dp == 0
        for name, p in self.module.named_parameters():
            out |= {n: w.to(self._dtypes[n]) for n, w in gathered({name: p.detach()}, keep).items()}
        return out

    def place(self, where: Place) -> None:
        """Where training state is. `released`: masters and moments on the host, no gradient buffers, and weights that
        still infer and generate. `host`: the weights as well. On a CPU, and where they are offloaded, only gradient
        buffers come and go. Masters that are the weights themselves (fp32, or cut by FSDP) stay with them.

        A rollout engine that reads the module's own storage cannot generate while it is on the host.
        """
        if where == self._where:
            return
        if self.optimizer is not None:
            self.optimizer.free_grads()
        if self.device != "cpu" and not self.offloaded:
            weights, state = (_to("cpu" if away else self.device) for away in (where == "host", where != "device"))
            self._moved(weights if "host" in (where, self._where) else None, state)
        if self.optimizer is not None and where == "device":
            self.optimizer.take_grads()
        self._where = where

    def _moved(self, weights: Move | None, state: Move) -> None:
        """weights: None where they stay."""
        if weights is not None:
            self.module._apply(weights)
        if self.optimizer is not None:
            self.optimizer.moved(state)

    def _must_be_here(self, state: bool = True) -> None:
        """state: masters and gradients are needed as well as weights."""
        if self._where == "host" or (state and self._where != "device"):
            raise RuntimeError(f"the {self.name} is placed on {self._where!r}; call place('device') first")

    def pieces(self) -> dict[str, Piece]:
        """Masters and moments as they lie here, by KIND/NAME; {} of a frozen engine."""
        return {f"{kind}/{name}": piece for kind, name, piece in self._pieces()}

    def owned_pieces(self) -> dict[str, Piece]:
        """Those parts of `pieces` that this rank saves; data replicas have the same, of which one writes."""
        params = self._params()
        return {f"{kind}/{name}": self._owned(name, params[name], piece) for kind, name, piece in self._pieces()}

    def _pieces(self) -> Iterator[tuple[str, str, Piece]]:
        params = self._params()
        for kind, tensors in self.optimizer.state().items() if self.optimizer is not None else ():
            for name, tensor in tensors.items():
                p = params[name]
                yield kind, name, Piece(tensor, self.holding.box(name, p), self.holding.shape(name, p))

    def _owned(self, name: str, p: Tensor, piece: Piece) -> Piece:
        mine = piece.tensor[self.holding.own(name, p)] if piece.tensor.numel() else piece.tensor
        return Piece(mine, self.holding.owned(name, p), piece.shape)

    def _params(self) -> dict[str, Tensor]:
        """By name, those that are trained."""
        return {} if self.optimizer is None else dict(zip(self.optimizer.names, self.optimizer.params, strict=True))

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


def _to(device: str) -> Move:
    return lambda x: x.to(device)


def _offloads(update: UpdateConfig, device: str, mesh: Mesh) -> bool:
    """Whether parts lie on the host. On a CPU there is no other place, so the option changes nothing."""
    if not update.cpu_offload or device == "cpu":
        return False
    if not mesh.sharded:
        raise ConfigError(
            "update.cpu_offload: only a model that is sharded over ranks (fsdp above 1) is offloaded; set it to false"
        )
    return True


def _pipeline(module: nn.Module, mesh: Mesh, device: str) -> Pipeline | None:
    """Of a module that is not sharded yet, as its dtype is still the one that computes."""
    axis = mesh.pipeline()
    return None if axis is None else Pipeline(axis, next(module.parameters()).dtype, device)


def _is_end(name: str) -> bool:
    """Whether a parameter is an embedding or an output head: looked up, or applied to scored rows only."""
    return "embed" in name or name.startswith(("lm_head.", "score."))
