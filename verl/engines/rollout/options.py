"""What an engine is told besides its model, each value checked by type and range before any model loads."""

from __future__ import annotations

from dataclasses import dataclass

from verl.core.checked import choice, real, whole


@dataclass(frozen=True)
class Options:
    """As in RolloutConfig. max_model_len: longest prompt and response together; None: the model's own limit.

    RolloutError names the first value that is of another type or out of range.
    """

    max_sequences: int = 256
    prefill_tokens: int = 4096
    kv_cache_gb: float | None = None
    prefix_cache_gb: float = 0.0
    max_model_len: int | None = None
    compile: str = "auto"

    def __post_init__(self) -> None:
        whole("rollout.max_sequences", self.max_sequences, 1)
        whole("rollout.prefill_tokens", self.prefill_tokens, 1)
        if self.kv_cache_gb is not None:
            real("rollout.kv_cache_gb", self.kv_cache_gb, lambda gb: gb > 0, "above 0, or null for no limit")
        real("rollout.prefix_cache_gb", self.prefix_cache_gb, lambda gb: gb >= 0, "0 or more")
        if self.max_model_len is not None:
            whole("max_model_len", self.max_model_len)
        choice("rollout.compile", self.compile, ("auto", "on", "off"))
