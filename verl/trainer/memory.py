"""What each role will hold, estimated from its model's shape. Loads no model."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.core.errors import ModelError
from verl.engines.rollout.memory import token_bytes
from verl.engines.train.micro_batches import tokens_at_once
from verl.models.config import DecoderConfig
from verl.models.source import resolve
from verl.parallel.layout import Layout, generation_tp, layout_of, pools_of
from verl.planning.shape import LOGITS_AT_ONCE, Role, RoleName, activation_bytes, of_parameter, share
from verl.trainer.device import pick_device
from verl.utils.monitoring import memory_total

GB = 1e9
KV_CACHE = "KV cache (at most)"
"""Part that holds the slots of running sequences and the prefix cache."""
PROCESS_GB = 0.5
"""Resident before any model: Python, torch and other libraries, the data set, the tokenizer, compiled kernels."""
_PIECES = 0.2
"""Of activations, on a host: freed memory between them that fits nothing (measured at 2,048 to 8,192 tokens)."""
_SLOT_TOKENS = 64
"""The KV cache grows to a multiple of this many tokens (`SlotCache`), and by half the slots that it had."""


@dataclass(frozen=True)
class RoleMemory:
    """One role. num_params: None where the shape is not known (then why says so). gb: part to GB.

    kept: held for the whole run, once it is there; passing: only while the role is updated.
    """

    role: str
    path: str
    num_params: int | None = None
    kept: dict[str, float] = field(default_factory=dict)
    passing: dict[str, float] = field(default_factory=dict)
    why: str = ""


def estimate(cfg: RunConfig, algorithm: Algorithm, longest: int) -> list[RoleMemory]:
    """The roles that this configuration builds, with what one process of each will hold. longest: tokens of the longest
    sequence.
    """
    p = cfg.parallel
    roles = [_role(cfg, "actor", cfg.actor.path, layout_of(p, "actor"), trains=True, longest=longest)]
    if "ref" in algorithm.roles:
        roles.append(_role(cfg, "ref", cfg.ref.path or cfg.actor.path, layout_of(p, "ref")))
    if "critic" in algorithm.roles:
        path = cfg.critic.path or cfg.actor.path
        roles.append(_role(cfg, "critic", path, layout_of(p, "critic"), trains=True, head=False))
    if cfg.reward.model_path is not None:
        roles.append(_role(cfg, "reward", cfg.reward.model_path, layout_of(p, "reward"), head=False))
    return roles


def processes(cfg: RunConfig, roles: list[RoleMemory]) -> list[tuple[int, float]]:
    """(how many, peak GB of one) of the processes that hold the same roles."""
    named = {role.role: role for role in roles}
    shared = pools_of(cfg.parallel, list(named))
    return [(layout_of(cfg.parallel, names[0]).world, peak_gb([named[n] for n in names])) for names in shared]


@dataclass(frozen=True)
class Peak:
    """Estimated GB of `count` processes, or of the one that holds most where each has a device of its own (`together`
    False), and the GB that are there.
    """

    gb: float
    have: float
    count: int
    together: bool

    @property
    def fits(self) -> bool:
        return self.gb <= 0.9 * self.have

    @classmethod
    def of(cls, cfg: RunConfig, roles: list[RoleMemory]) -> Peak:
        each, device = processes(cfg, roles), pick_device(cfg)
        together = device == "cpu" and cfg.parallel.address is None
        gb = sum(count * gb for count, gb in each) if together else max(gb for _, gb in each)
        return cls(gb, memory_total(device), sum(count for count, _ in each), together)


def with_fsdp(cfg: RunConfig, algorithm: Algorithm, longest: int) -> tuple[RunConfig, str]:
    """The configuration with parallel.fsdp decided, and why ("" where nothing was to decide).

    null becomes 1 where replicas that each hold all of their part fit into memory, else -1, and also where a model's
    size is not known. longest: tokens of the longest sequence.
    """
    if cfg.parallel.fsdp is not None:
        return cfg, ""
    whole = _fsdp(cfg, 1)
    if cfg.parallel.executor == "embedded" or layout_of(cfg.parallel, "actor").dp == 1:
        return whole, ""
    roles = estimate(whole, algorithm, longest)
    peak, unknown = Peak.of(whole, roles), [role.path for role in roles if role.num_params is None]
    if peak.fits and not unknown:
        return whole, ""
    why = f"whole replicas would take {peak.gb:.1f} of {peak.have:.1f} GB"
    if unknown:
        why = f"whether whole replicas fit is not known, as the size of {unknown[0]} is not"
    return _fsdp(cfg, -1), f"parallel.fsdp: -1, data parallel processes share one copy (FSDP): {why}"


def _fsdp(cfg: RunConfig, size: int) -> RunConfig:
    return cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"fsdp": size})})


def peak_gb(roles: list[RoleMemory]) -> float:
    """All that is kept, and what passes in the update of one role: roles are updated one after the other."""
    kept = sum(sum(role.kept.values()) for role in roles)
    return kept + max(sum(role.passing.values()) for role in roles)


def _role(
    cfg: RunConfig,
    role: RoleName,
    path: str,
    layout: Layout,
    *,
    trains: bool = False,
    longest: int = 0,
    head: bool = True,
) -> RoleMemory:
    """Of the process that holds most. longest: of the role that samples, tokens of its longest sequence."""
    try:
        source = resolve(path, cfg.model.trust_remote_code)
        shape = DecoderConfig.from_hf(source.hf_config())
    except ModelError as e:
        return RoleMemory(role, path, why=str(e))
    n, width, on_host = shape.num_params(head), 2 if cfg.model.dtype == "bfloat16" else 4, pick_device(cfg) == "cpu"
    mine = share(Role(role, shape, width, head, trains), layout.tp, layout.pp)
    sizes = of_parameter(width, trains, layout.fsdp)
    kept = {part: mine.params * size / layout.fsdp / GB for part, size in sizes.items()}
    passing: dict[str, float] = {}
    if on_host and source.is_gguf:
        kept["model file (mapped)"] = source.path.stat().st_size / GB
    if trains:
        a_token = activation_bytes(shape, width, cfg.update.activation_checkpointing, layout.tp, mine.layers)
        passing["activations (rough)"] = tokens_at_once(cfg.update, pick_device(cfg)) * a_token / GB
        if on_host:
            passing["freed memory in pieces"] = _PIECES * passing["activations (rough)"]
    if longest:
        tp = generation_tp(cfg.parallel)
        kept[KV_CACHE] = _cache_gb(cfg, longest, token_bytes(shape, width), layout.world // tp) / tp
        if not layout.generates_in_place(tp):
            kept["weights that generate"] = share(Role(role, shape, width), tp, 1).params * width / GB
        passing["logits and their gradient"] = 2 * _logits(cfg, -(-shape.vocab_size // layout.tp)) * width / GB
        if on_host:
            kept["process (Python, libraries, data)"] = PROCESS_GB
    return RoleMemory(role, path, n, kept, passing)


def _cache_gb(cfg: RunConfig, longest: int, of_token: int, replicas: int) -> float:
    """Slots for one replica's samples of a step or of an evaluation, with the spare ones that growing makes."""
    evaluated = cfg.eval.max_response_tokens or cfg.rollout.max_response_tokens
    tokens = longest + max(0, evaluated - cfg.rollout.max_response_tokens)
    running = -(-max(cfg.trainer.prompts_per_step * cfg.rollout.n, cfg.data.eval_size * cfg.eval.n) // replicas)
    slots = min(cfg.rollout.max_sequences, running * 3 // 2)
    cache = slots * (tokens + -tokens % _SLOT_TOKENS) * of_token / GB
    return min(cache, cfg.rollout.kv_cache_gb or cache) + cfg.rollout.prefix_cache_gb


def _logits(cfg: RunConfig, vocab: int) -> int:
    """Most that are held at one time: those of a step's sampled tokens, of a micro-batch, or of a chunk."""
    sampled = cfg.trainer.prompts_per_step * cfg.rollout.n * cfg.rollout.max_response_tokens
    return min(vocab * min(sampled, tokens_at_once(cfg.update, pick_device(cfg))), max(LOGITS_AT_ONCE, vocab))
