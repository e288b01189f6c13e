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
from verl.trainer.build import pick_device

GB = 1e9
KV_CACHE = "KV cache (at most)"
"""Part that holds the slots of running sequences and the prefix cache."""


@dataclass(frozen=True)
class RoleMemory:
    """One role. num_params: None where the shape is not known (then why says so). gb: part to GB.

    kept: held for the whole run; passing: only while the phase that needs it lasts.
    """

    role: str
    path: str
    num_params: int | None = None
    kept: dict[str, float] = field(default_factory=dict)
    passing: dict[str, float] = field(default_factory=dict)
    why: str = ""


def estimate(cfg: RunConfig, algorithm: Algorithm, longest: int) -> list[RoleMemory]:
    """The roles that this configuration builds, with what each will hold. longest: tokens of the longest sequence."""
    running = min(cfg.rollout.max_sequences, cfg.trainer.prompts_per_step * cfg.rollout.n)
    roles = [_role(cfg, "actor", cfg.actor.path, trains=True, cached_tokens=running * longest)]
    if "ref_logprobs" in algorithm.needs:
        roles.append(_role(cfg, "reference", cfg.ref.path or cfg.actor.path))
    if "values" in algorithm.needs:
        roles.append(_role(cfg, "critic", cfg.critic.path or cfg.actor.path, trains=True, head=False))
    if cfg.reward.model_path is not None:
        roles.append(_role(cfg, "reward model", cfg.reward.model_path, head=False))
    return roles


def peak_gb(roles: list[RoleMemory]) -> float:
    """All that is kept, and the largest of what passes: phases do not overlap in one process."""
    kept = sum(sum(role.kept.values()) for role in roles)
    return kept + max((gb for role in roles for gb in role.passing.values()), default=0.0)


def _role(
    cfg: RunConfig, role: str, path: str, *, trains: bool = False, cached_tokens: int = 0, head: bool = True
) -> RoleMemory:
    try:
        shape = DecoderConfig.from_hf(resolve(path, cfg.model.trust_remote_code).hf_config())
    except ModelError as e:
        return RoleMemory(role, path, why=str(e))
    n, width = shape.num_params(head), 2 if cfg.model.dtype == "bfloat16" else 4
    kept = {"weights": n * width / GB}
    passing = {}
    if trains:
        kept |= {"gradients (fp32)": 4 * n / GB, "moments (fp32)": 8 * n / GB}
        if width < 4:
            kept["masters (fp32)"] = 4 * n / GB
        a_token = _activation_bytes(shape, width, cfg.update.activation_checkpointing)
        passing["activations (rough)"] = tokens_at_once(cfg.update, pick_device(cfg)) * a_token / GB
    if cached_tokens:
        cache = cached_tokens * token_bytes(shape, width) / GB
        passing[KV_CACHE] = min(cache, cfg.rollout.kv_cache_gb or cache) + cfg.rollout.prefix_cache_gb
    return RoleMemory(role, path, n, kept, passing)


def _activation_bytes(shape: DecoderConfig, width: int, recompute: bool) -> int:
    """Of one token: what a layer keeps for its backward pass (inputs of norms and products, q, k, v, gate, up).

    recompute: the layers keep their input only, and one of them at a time all of it.
    """
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = 4 * shape.hidden_size + 3 * q + 4 * kv + 4 * shape.intermediate_size
    return (shape.num_layers * shape.hidden_size + layer if recompute else shape.num_layers * layer) * width
