"""How each parameter of the decoder is cut over tensor-parallel ranks and pipeline stages. Pure.

Column parallel (outputs cut, dimension 0): queries, keys, values, gate and up, with their biases. Row parallel (inputs
cut, dimension 1): o_proj and down_proj; their results are summed, and their bias is whole everywhere and added once,
after the sum. Embedding and head: dimension 0, by vocabulary. All else (norms, a score head) is whole on every rank.

Sizes are cut as torch.distributed.tensor cuts them (pieces of ceil(size / parts), the last may be smaller); queries in
whole heads, as even as can be. A rank holds the key heads that its query heads read, so that a key head may be held by
several ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from torch import Tensor

from verl.core.errors import ModelError
from verl.models.config import DecoderConfig

Unit = Literal["query", "key", "intermediate", "vocabulary"]
CUTS: dict[str, tuple[int, Unit]] = {
    "q_proj": (0, "query"),
    "k_proj": (0, "key"),
    "v_proj": (0, "key"),
    "o_proj": (1, "query"),
    "gate_proj": (0, "intermediate"),
    "up_proj": (0, "intermediate"),
    "down_proj": (1, "intermediate"),
    "embed_tokens": (0, "vocabulary"),
    "lm_head": (0, "vocabulary"),
}
"""By the module's name: the dimension of its weight that is cut, and what is counted there."""
_NAME = re.compile(r"(?:.*\.)?(\w+)\.(weight|bias)")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\..*")


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of the `size` that a tensor has along `dim`."""

    dim: int
    start: int
    stop: int
    size: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Of this part in a whole tensor."""
        return (*(slice(None) for _ in range(self.dim)), slice(self.start, self.stop))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a whole tensor of this shape has such a part."""
        return len(shape) > self.dim and shape[self.dim] == self.size

    def of(self, whole: Tensor) -> Tensor:
        """A view of this part of a whole tensor."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the tensor that a part of this shape belongs to."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Heads:
    """The query heads of a rank, and the key heads that they read.

    reads: key heads, counted from the first of `keys`, such that equally many query heads in a row read each of them;
    None where that is `keys` as they are. So a rank whose query heads end in the middle of a group repeats key heads.
    """

    queries: range
    keys: range
    reads: tuple[int, ...] | None

    @property
    def num_read(self) -> int:
        """Key heads that attention and the cache of keys see."""
        return len(self.keys) if self.reads is None else len(self.reads)


class Cuts:
    """The parts of a decoder over `size` tensor-parallel ranks. ModelError where a rank would be left without work."""

    def __init__(self, config: DecoderConfig, size: int):
        self.config, self.size = config, size
        for count, what in (
            (config.num_heads, f"query heads (over {config.num_kv_heads} key heads)"),
            (config.intermediate_size, "intermediate elements"),
            (config.vocab_size, "vocabulary entries"),
        ):
            even = what.startswith("query")
            if count < size or (not even and chunk(count, size, size - 1)[0] == count):
                raise ModelError(
                    f"parallel.*.tp: {size} ranks are too many for {count} {what}, some would have none; "
                    f"set tp to {min(count, size - 1)} or less"
                )
        self.heads = tuple(self._heads(rank) for rank in range(size))
        self.shares_keys = any(a.keys.stop > b.keys.start for a, b in zip(self.heads, self.heads[1:], strict=False))
        """Whether any key head is held by more than one rank."""

    def local(self, rank: int) -> DecoderConfig:
        """The sizes of what a rank holds of a layer."""
        heads = self.heads[rank]
        start, stop = chunk(self.config.intermediate_size, self.size, rank)
        return replace(
            self.config, num_heads=len(heads.queries), num_kv_heads=len(heads.keys), intermediate_size=stop - start
        )

    @property
    def cached_heads(self) -> int:
        """Most key heads that a rank's cache holds: what every rank must plan by, or they would plan differently."""
        return max(heads.num_read for heads in self.heads)

    def part(self, name: str, rank: int) -> Part | None:
        """What a rank holds of the parameter of this name; None: all of it."""
        known = _NAME.fullmatch(name)
        if known is None or known[1] not in CUTS:
            return None
        dim, unit = CUTS[known[1]]
        if known[2] == "bias" and dim == 1:
            return None
        start, stop, size = self._bounds(unit, rank)
        return Part(dim, start, stop, size)

    def owned(self, name: str, local: Tensor, rank: int) -> Tensor:
        """A view of the part of a rank's own tensor (parameter, gradient ...) that counts as its: what no rank before
        it holds. Over all ranks every element counts once, for norms and exports.
        """
        part, own = self.part(name, rank), self.owned_part(name, rank)
        if part is None or own is None:
            return local if rank == 0 else local[:0]
        return local.narrow(part.dim, own.start - part.start, own.stop - own.start)

    def owned_part(self, name: str, rank: int) -> Part | None:
        """Where `owned` is in the whole parameter, maybe empty; None for one that is not cut, which rank 0 owns."""
        part = self.part(name, rank)
        before = self.part(name, rank - 1) if rank else None
        return part if part is None or before is None else replace(part, start=max(part.start, before.stop))

    def _bounds(self, unit: Unit, rank: int) -> tuple[int, int, int]:
        """(start, stop, size) in elements."""
        c = self.config
        if unit in ("intermediate", "vocabulary"):
            size = c.intermediate_size if unit == "intermediate" else c.vocab_size
            return *chunk(size, self.size, rank), size
        heads = self.heads[rank].queries if unit == "query" else self.heads[rank].keys
        size = c.num_heads if unit == "query" else c.num_kv_heads
        return heads.start * c.head_dim, heads.stop * c.head_dim, size * c.head_dim

    def _heads(self, rank: int) -> Heads:
        least, more = divmod(self.config.num_heads, self.size)
        start = rank * least + min(rank, more)
        queries = range(start, start + least + (rank < more))
        group = self.config.num_heads // self.config.num_kv_heads
        keys = range(queries.start // group, (queries.stop - 1) // group + 1)
        readers = [sum(head // group == key for head in queries) for key in keys]
        run = gcd(*readers)
        reads = tuple(i for i, count in enumerate(readers) for _ in range(count // run))
        return Heads(queries, keys, None if len(reads) == len(keys) else reads)


@dataclass(frozen=True)
class Stage:
    """Stage `number` of `count`: layer i of n is in stage i * count // n. The embedding is in the first one; norm and
    head are in the last, and there is a tied embedding as well. ModelError where a stage would have no layer.
    """

    number: int
    count: int
    num_layers: int

    def __post_init__(self) -> None:
        if self.count > self.num_layers:
            raise ModelError(
                f"parallel.*.pp: {self.count} stages are too many for {self.num_layers} layers; "
                f"set pp to {self.num_layers} or less"
            )

    @property
    def layers(self) -> range:
        first, end = (-(-number * self.num_layers // self.count) for number in (self.number, self.number + 1))
        return range(first, end)

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1

    def embeds(self, tied: bool) -> bool:
        """Whether it holds the embedding."""
        return self.first or (self.last and tied)

    def holds(self, name: str, tied: bool) -> bool:
        """Whether it holds the parameter of this name."""
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            return int(layer[1]) in self.layers
        return self.embeds(tied) if "embed_tokens" in name else self.last


@dataclass(frozen=True)
class Share:
    """What one process holds of a checkpoint: its stage's parameters, and of each its part. cuts: None without tensor
    parallelism.
    """

    stage: Stage
    cuts: Cuts | None
    tp_rank: int
    tied: bool

    def holds(self, name: str) -> bool:
        return self.stage.holds(name, self.tied)

    def part(self, name: str) -> Part | None:
        """None: all of it."""
        return None if self.cuts is None else self.cuts.part(name, self.tp_rank)


def chunk(size: int, parts: int, number: int) -> tuple[int, int]:
    """[start, stop) of piece `number`: ceil(size / parts) each, as long as there are any."""
    width = -(-size // parts)
    return min(number * width, size), min((number + 1) * width, size)
