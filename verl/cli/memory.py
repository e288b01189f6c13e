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
from verl.planning.shape import LOGITS_AT_ONCE, activation_bytes, of_parameter
from verl.trainer.build import pick_device

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
    """The roles that this configuration builds, with what each will hold. longest: tokens of the longest sequence."""
    roles = [_role(cfg, "actor", cfg.actor.path, trains=True, longest=longest)]
    if "ref_logprobs" in algorithm.needs:
        roles.append(_role(cfg, "reference", cfg.ref.path or cfg.actor.path))
    if "values" in algorithm.needs:
        roles.append(_role(cfg, "critic", cfg.critic.path or cfg.actor.path, trains=True, head=False))
    if cfg.reward.model_path is not None:
        roles.append(_role(cfg, "reward model", cfg.reward.model_path, head=False))
    return roles


def peak_gb(roles: list[RoleMemory]) -> float:
    """All that is kept, and what passes in the update of one role: roles are updated one after the other."""
    kept = sum(sum(role.kept.values()) for role in roles)
    return kept + max(sum(role.passing.values()) for role in roles)


def _role(
    cfg: RunConfig, role: str, path: str, *, trains: bool = False, longest: int = 0, head: bool = True
) -> RoleMemory:
    """longest: of the role that samples, tokens of its longest sequence."""
    try:
        source = resolve(path, cfg.model.trust_remote_code)
        shape = DecoderConfig.from_hf(source.hf_config())
    except ModelError as e:
        return RoleMemory(role, path, why=str(e))
    n, width, on_host = shape.num_params(head), 2 if cfg.model.dtype == "bfloat16" else 4, pick_device(cfg) == "cpu"
    kept = {part: n * size / GB for part, size in of_parameter(width, trains).items()}
    passing: dict[str, float] = {}
    if on_host and source.is_gguf:
        kept["model file (mapped)"] = source.path.stat().st_size / GB
    if trains:
        a_token = activation_bytes(shape, width, cfg.update.activation_checkpointing)
        passing["activations (rough)"] = tokens_at_once(cfg.update, pick_device(cfg)) * a_token / GB
        if on_host:
            passing["freed memory in pieces"] = _PIECES * passing["activations (rough)"]
    if longest:
        kept[KV_CACHE] = _cache_gb(cfg, longest, token_bytes(shape, width))
        passing["logits and their gradient"] = 2 * _logits(cfg, shape.vocab_size) * width / GB
        if on_host:
            kept["process (Python, libraries, data)"] = PROCESS_GB
    return RoleMemory(role, path, n, kept, passing)


def _cache_gb(cfg: RunConfig, longest: int, of_token: int) -> float:
    """Slots for the samples of a step or of an evaluation, with the spare ones that growing makes."""
    evaluated = cfg.eval.max_response_tokens or cfg.rollout.max_response_tokens
    tokens = longest + max(0, evaluated - cfg.rollout.max_response_tokens)
    running = max(cfg.trainer.prompts_per_step * cfg.rollout.n, cfg.data.eval_size * cfg.eval.n)
    slots = min(cfg.rollout.max_sequences, running * 3 // 2)
    cache = slots * (tokens + -tokens % _SLOT_TOKENS) * of_token / GB
    return min(cache, cfg.rollout.kv_cache_gb or cache) + cfg.rollout.prefix_cache_gb


def _logits(cfg: RunConfig, vocab: int) -> int:
    """Most that are held at one time: those of a step's sampled tokens, of a micro-batch, or of a chunk."""
    sampled = cfg.trainer.prompts_per_step * cfg.rollout.n * cfg.rollout.max_response_tokens
    return min(vocab * min(sampled, tokens_at_once(cfg.update, pick_device(cfg))), max(LOGITS_AT_ONCE, vocab))
