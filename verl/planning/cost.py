"""Seconds and bytes of the parts of a step for a given layout. Pure; the formulas are those of docs/planning.md.

After HybridFlow (arXiv:2409.19256), appendix C: training and scoring are bound by arithmetic, decoding by memory
traffic. Nothing is taken to overlap within a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.core.errors import ConfigError
from verl.engines.rollout.memory import rounded
from verl.parallel.layout import Layout
from verl.planning.hardware import Hardware
from verl.planning.shape import LOGITS_AT_ONCE, Role, activation_bytes, cache_bytes, share, state_bytes
from verl.planning.workload import Workload
from verl.utils.flops import model_flops

Parts = dict[str, float]
"""What takes time, in seconds."""
LATENCY = 10e-6
"""Seconds that a collective takes however little it moves."""
STEP_BYTES = 32
"""Of a parameter that AdamW reads and writes: gradient, master and two moments, both ways."""

COMPUTE, BUBBLE, TP, FSDP, DP, OPTIMIZER, HOST, STAGES = (
    "arithmetic",
    "pipeline bubble",
    "tensor parallel sums",
    "FSDP gathers",
    "gradient sums",
    "optimizer's memory traffic",
    "transfers to the host",
    "activations between stages",
)
PREFILL, DECODE_READS, DECODE_COMPUTE = "prefill", "decoding: reading weights and cache", "decoding: arithmetic"


def all_reduce(size: float, ranks: int, bandwidth: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes: each rank moves 2 (n-1)/n of them."""
    return 0.0 if ranks == 1 else 2 * (ranks - 1) / ranks * size / bandwidth + LATENCY


def all_gather(size: float, ranks: int, bandwidth: float) -> float:
    """Seconds of an all-gather (or reduce-scatter) whose whole is `size` bytes: each rank moves (n-1)/n of them."""
    return 0.0 if ranks == 1 else (ranks - 1) / ranks * size / bandwidth + LATENCY


def resharded(size: float, train: Layout, tp: int) -> float:
    """Bytes that a rank receives of a model of `size` bytes where it generates with tp ranks (pg = 1).

    It needs 1/tg and holds of that 1/(max(tp, tg) pp fsdp). Where tg divides tp this is HybridFlow's
    M (tp pp - tg pg)/(tg pg tp pp) (table 2), with FSDP's cut counted like the stages'.
    """
    return size * (1 / tp - 1 / (max(train.tp, tp) * train.pp * train.fsdp))


def scoring(role: Role, work: Workload, layout: Layout, hw: Hardware) -> Parts:
    """One forward pass over a step's sequences."""
    return _passes(role, work, layout, hw, -(-work.sequences // layout.dp), backward=False)


def training(role: Role, work: Workload, layout: Layout, hw: Hardware) -> Parts:
    """All updates of a step: epochs x mini-batches, each a forward and a backward pass, a sum and an optimizer step."""
    updates = work.epochs * work.mini_batches
    sequences = -(-work.sequences // (layout.dp * work.mini_batches))
    once = _passes(role, work, layout, hw, sequences, backward=True)
    n = share(role, layout.tp, layout.pp).params
    replicas = layout.dp // layout.fsdp
    once[DP] = all_reduce(4 * n / layout.fsdp, replicas, hw.bandwidth(layout.world, layout.world))
    offloaded = work.offload and layout.fsdp > 1
    once[OPTIMIZER] = STEP_BYTES * n / layout.fsdp / (hw.host if offloaded else hw.hbm)
    return {name: updates * seconds for name, seconds in once.items()}


def _passes(role: Role, work: Workload, layout: Layout, hw: Hardware, sequences: int, *, backward: bool) -> Parts:
    """Of `sequences` on each data parallel rank, in m micro-batches: m + pp - 1 turns of the slowest stage."""
    shape, part = role.shape, share(role, layout.tp, layout.pp)
    tokens, world = work.computed(sequences), layout.world
    micros = -(-tokens // work.micro)
    times = 1 if not backward else 2
    width = shape.num_heads * shape.head_dim // layout.tp * part.layers
    flops = model_flops(part.products, tokens, backward=backward, attention_width=width, mean_context=work.length / 2)
    again = 4 / 3 if backward and work.recompute else 1.0
    compute = again * flops / hw.flops
    hidden = tokens * shape.hidden_size * role.width
    sums = 2 * part.layers * (times + (again > 1))
    tp = sums * (micros * all_reduce(hidden / micros, layout.tp, hw.bandwidth(layout.tp, world)))
    gathered = all_gather(
        part.params * role.width, layout.fsdp, hw.bandwidth(layout.tp * layout.pp * layout.fsdp, world)
    )
    scattered = all_gather(part.params * 4, layout.fsdp, hw.bandwidth(layout.tp * layout.pp * layout.fsdp, world))
    sent = times * hidden / hw.bandwidth(layout.tp * layout.pp, world) if layout.pp > 1 else 0.0
    moved = part.params * (times * role.width + (4 if backward else 0)) / layout.fsdp
    host = micros * moved / hw.host if work.offload and layout.fsdp > 1 and role.trains else 0.0
    return {
        COMPUTE: compute,
        TP: tp,
        BUBBLE: (layout.pp - 1) / micros * (compute + tp),
        STAGES: sent,
        FSDP: micros * (times * gathered + (scattered if backward else 0.0)),
        HOST: host,
    }


def kept(role: Role, work: Workload, layout: Layout) -> float:
    """Bytes of a rank that stay for the whole run, without the cache and without weights for generation."""
    if work.offload and layout.fsdp > 1 and role.trains:
        return 0.0
    return state_bytes(role, layout.tp, layout.pp, layout.fsdp)


def passing(role: Role, work: Workload, layout: Layout) -> float:
    """Bytes of a rank while its role works: activations of the micro-batches in flight, logits, gathered weights."""
    shape, part = role.shape, share(role, layout.tp, layout.pp)
    parts = layout.dp * (work.mini_batches if role.trains else 1)
    here = work.computed(-(-work.sequences // parts))
    tokens = min(work.micro, here)
    total = 0.0
    if role.trains:
        flying = min(layout.pp, -(-here // work.micro))
        total += flying * tokens * activation_bytes(shape, role.width, work.recompute, layout.tp, part.layers)
    else:
        total += tokens * activation_bytes(shape, role.width, False, layout.tp, 1)
    if role.head:
        vocab = -(-shape.vocab_size // layout.tp)
        total += (2 if role.trains else 1) * min(vocab * tokens, max(LOGITS_AT_ONCE, vocab)) * role.width
    if layout.fsdp > 1:
        whole = part.ends + 2 * part.layer  # the ends stay whole; a layer computes while the next is gathered
        total += whole * role.width * (2 if role.trains else 1)
    return total


@dataclass(frozen=True)
class Generation:
    """tp: of the layout that generates. at_once: sequences that decode together on a replica; waves: how many times.

    cache, weights: bytes of a rank (weights 0 where it reads the trainer's own). parts, reshard: seconds.
    """

    tp: int
    at_once: int
    waves: int
    cache: float
    weights: float
    parts: Parts
    reshard: float


def copied(actor: Role, train: Layout, tp: int) -> float:
    """Bytes of the weights that generation holds beside the trainer's."""
    return 0.0 if train.generates_in_place(tp) else share(actor, tp, 1).params * actor.width


def slot(actor: Role, work: Workload, tp: int) -> float:
    """Bytes of a rank's cache for one sequence."""
    return float(rounded(work.length) * cache_bytes(actor, tp))


def generation(actor: Role, work: Workload, train: Layout, tp: int, room: float, hw: Hardware) -> Generation | None:
    """Of a step's samples, by world/tp replicas. room: bytes of a rank for the cache; None where not one sequence fits.

    Waves are even, so that more room never costs time.
    """
    replicas = train.world // tp
    if replicas * tp != train.world:
        raise ConfigError(f"parallel.generation_tp: {tp} does not divide the {train.world} processes of the actor")
    sequences, a_slot = -(-work.sequences // replicas), slot(actor, work, tp)
    granted = room - work.prefixes
    if work.cache_bytes is not None:
        granted = min(granted, work.cache_bytes)
    at_once = int(min(sequences, work.max_sequences, granted // a_slot))
    if at_once < 1:
        return None
    waves = -(-sequences // at_once)
    at_once = -(-sequences // waves)
    received = resharded(share(actor, 1, 1).params * actor.width, train, tp)
    reshard = received / hw.bandwidth(train.tp * train.pp * train.fsdp, train.world)
    weights = copied(actor, train, tp)
    parts = _sampling(actor, work, tp, sequences, waves, train.world, hw)
    return Generation(tp, at_once, waves, at_once * a_slot + work.prefixes, weights, parts, reshard)


def _sampling(actor: Role, work: Workload, tp: int, sequences: int, waves: int, world: int, hw: Hardware) -> Parts:
    """Seconds of prefill (arithmetic, a prompt once for its samples) and of decoding (the larger of traffic and
    arithmetic, at the mean context), and of the sums that tensor parallel ranks make in both.
    """
    shape, part = actor.shape, share(actor, tp, 1)
    prompts = -(-sequences // work.samples) * work.prompt_tokens
    attention = shape.num_heads * shape.head_dim // tp * part.layers
    prefill = model_flops(
        part.products, prompts, backward=False, attention_width=attention, mean_context=work.prompt_tokens / 2
    )
    context = work.prompt_tokens + work.response_tokens / 2
    steps = work.response_tokens * waves
    cache = sequences * work.response_tokens * context * cache_bytes(actor, tp)
    reads = (steps * part.products * actor.width + cache) / hw.hbm
    decoded = sequences * work.response_tokens
    compute = (
        model_flops(part.products, decoded, backward=False, attention_width=attention, mean_context=context) / hw.flops
    )
    link, sums = hw.bandwidth(tp, world), 2 * part.layers
    token = shape.hidden_size * actor.width
    tp_s = sums * (steps * all_reduce(decoded / steps * token, tp, link) + all_reduce(prompts * token, tp, link))
    decoding = {DECODE_READS: reads} if reads >= compute else {DECODE_COMPUTE: compute}
    return {PREFILL: prefill / hw.flops, **decoding, TP: tp_s}
