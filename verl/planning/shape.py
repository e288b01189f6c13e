"""Sizes of models and of their parts: parameters, bytes of state, of activations and of the cache. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from verl.engines.rollout.memory import token_bytes
from verl.models.config import DecoderConfig
from verl.models.cuts import Cuts

GRADIENT_BYTES, MOMENT_BYTES, MASTER_BYTES = 4, 8, 4
"""Of a parameter, all fp32: its gradient, AdamW's two moments, and its master where it computes in less."""
LOGITS_AT_ONCE = 2**26
"""Logits that the trainer holds at one time (`models/logprobs.py`)."""
RoleName = Literal["actor", "ref", "critic", "reward"]


@dataclass(frozen=True, eq=False)
class Role:
    """A model in its role. width: bytes of a number as it computes; head: it has logits; trains, scores: what it does
    in a step besides generating. Equal only to itself, so that what is worked out of it can be remembered.
    """

    name: RoleName
    shape: DecoderConfig
    width: int
    head: bool = True
    trains: bool = False
    scores: bool = True


@dataclass(frozen=True)
class Share:
    """The largest part of a model that one rank of tp x pp holds. layers: how many; layer: parameters of one;
    ends: parameters of embedding, head and last norm; products: parameters that a token is multiplied with.
    """

    layers: int
    layer: int
    ends: int
    products: int

    @property
    def params(self) -> int:
        return self.layers * self.layer + self.ends


@lru_cache(maxsize=4096)
def share(role: Role, tp: int, pp: int) -> Share:
    """Of the rank that holds and computes most: the first of tensor parallel ranks, in the longest stage, with the
    larger end. ModelError where tp leaves a rank without work.
    """
    shape, head, d = role.shape, role.head, role.shape.hidden_size
    local = Cuts(shape, tp).local(0)
    layer = (local.num_params(False) - shape.vocab_size * d - d) // shape.num_layers
    layers, table = -(-shape.num_layers // pp), -(-shape.vocab_size // tp) * d
    untied = head and not shape.tied
    ends = (table + d if pp > 1 else table * (2 if untied else 1) + d) if head else (table + d)
    return Share(layers, layer, ends, layers * layer + (table if head else d))


def state_bytes(role: Role, tp: int = 1, pp: int = 1, fsdp: int = 1) -> float:
    """Weights of a rank, and where it trains gradients, moments and masters.

    Trained and sharded (fsdp > 1) the parts are the masters: 16 bytes a parameter; whole in bf16 18, in fp32 16.
    """
    n = share(role, tp, pp).params
    return n * sum(of_parameter(role.width, role.trains, fsdp).values()) / fsdp


def of_parameter(width: int, trains: bool, fsdp: int = 1) -> dict[str, int]:
    """Bytes that are kept of one parameter, by what they are. width: of a number as it computes."""
    if not trains:
        return {"weights": width}
    state = {"gradients (fp32)": GRADIENT_BYTES, "moments (fp32)": MOMENT_BYTES}
    masters = {"masters (fp32)": MASTER_BYTES}
    if fsdp > 1:
        return state | masters
    return {"weights": width} | state | (masters if width < MASTER_BYTES else {})


def activation_bytes(
    shape: DecoderConfig, width: int, recompute: bool, tp: int = 1, layers: int | None = None
) -> float:
    """Of one token: what a layer keeps for its backward pass (inputs of norms and products, q, k, v, gate, up).

    recompute: the layers keep their input only, and one of them at a time all of it. Tensor parallel ranks cut all but
    the four of the hidden size. layers: of the rank; None: all.
    """
    layers = shape.num_layers if layers is None else layers
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = 4 * shape.hidden_size + (3 * q + 4 * kv + 4 * shape.intermediate_size) / tp
    return (layers * shape.hidden_size + layer if recompute else layers * layer) * width


@lru_cache(maxsize=256)
def cache_bytes(role: Role, tp: int) -> int:
    """Keys and values of one token on one tensor parallel rank, which holds the key heads that its queries read."""
    return token_bytes(role.shape, role.width) // role.shape.num_kv_heads * Cuts(role.shape, tp).cached_heads
