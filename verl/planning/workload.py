"""What a step does, in sequences and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.run import RunConfig

MICRO_BATCH_TOKENS = 8192
"""Of a GPU where update.micro_batch_tokens is null (`engines/train/micro_batches.py`)."""


@dataclass(frozen=True)
class Workload:
    """prompts a step with `samples` responses each; every prompt and response is taken to be as long as it may be.

    epochs, mini_batches, micro_tokens, share_prompt, recompute, offload: of an update. max_sequences, cache_bytes
    (None: no limit), prefixes (bytes): of generation.
    """

    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    epochs: int = 1
    mini_batches: int = 1
    micro_tokens: int = MICRO_BATCH_TOKENS
    share_prompt: bool = True
    recompute: bool = False
    offload: bool = False
    max_sequences: int = 256
    cache_bytes: float | None = None
    prefixes: float = 0.0

    @classmethod
    def of(cls, cfg: RunConfig) -> Workload:
        r, u = cfg.rollout, cfg.update
        return cls(
            cfg.trainer.prompts_per_step,
            r.n,
            cfg.data.max_prompt_tokens,
            r.max_response_tokens,
            u.epochs,
            u.mini_batches,
            u.micro_batch_tokens or MICRO_BATCH_TOKENS,
            u.share_prompt,
            u.activation_checkpointing,
            u.cpu_offload,
            r.max_sequences,
            None if r.kv_cache_gb is None else r.kv_cache_gb * 1e9,
            r.prefix_cache_gb * 1e9,
        )

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.response_tokens

    def computed(self, sequences: int) -> int:
        """Tokens that a model computes for so many sequences; with share_prompt a prompt counts once."""
        copies = -(-sequences // self.samples) if self.share_prompt else sequences
        return copies * self.prompt_tokens + sequences * self.response_tokens

    @property
    def micro(self) -> int:
        """Tokens of a full micro-batch, which holds one sequence at least."""
        return max(self.micro_tokens, self.length)
