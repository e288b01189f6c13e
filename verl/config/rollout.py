"""Rollout: how responses are sampled."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from verl.config.base import Section
from verl.core.generation import MIN_TEMPERATURE, may_divide


def _may_divide(temperature: float) -> float:
    if not may_divide(temperature):
        raise ValueError(f"must be {MIN_TEMPERATURE:g} or more, or 0 for greedy decoding")
    return temperature


class SamplingConfig(Section):
    """How one response is drawn."""

    temperature: Annotated[float, AfterValidator(_may_divide)] = Field(1.0, ge=0)
    """Logits are divided by it, in sampling and in training alike; 0 is greedy (evaluation only), else 1e-4 or more."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Mass of the most probable tokens kept. Training needs 1: the trainer's log-probs are those of the whole law."""
    top_k: int = Field(0, ge=0)
    """Most probable tokens kept; 0 keeps all. Training needs 0."""
    min_tokens: int = Field(0, ge=0)
    """No end token before this many tokens. Training needs 0."""


class RolloutConfig(Section):
    """Generation for training."""

    backend: str = "native"
    """`native`: continuous batching on the trainer's own weights. `hf`: transformers generate. `vllm`: vLLM."""
    n: int = Field(8, ge=1)
    """Responses sampled for each prompt."""
    max_response_tokens: int = Field(128, ge=1)
    """Longest response, in tokens."""
    sampling: SamplingConfig = SamplingConfig()
    """Law of training samples."""
    max_sequences: int = Field(256, ge=1)
    """Sequences decoded at one time."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Kernels of cached decoding, made by this machine's C++ compiler (2 s, once; native, CPU, bfloat16). `auto`: where
    one works; the run says where not.
    """
    prefill_tokens: int = Field(4096, ge=1)
    """Prompt tokens computed in one prefill step (native). A longer prompt is computed in chunks of so many, by turns
    with decoding; in chunks of twice as many each time that new weights came before it was done.
    """
    kv_cache_gb: float | None = Field(None, gt=0)
    """10^9 bytes that keys and values of the running sequences may take (native); null: no limit but `max_sequences`.
    A sequence starts where it fits; where those that run outgrow it, the youngest wait and go on later, in fp32 with
    the same tokens.
    """
    prefix_cache_gb: float = Field(0.0, ge=0)
    """10^9 bytes, beside `kv_cache_gb`, for keys and values of finished sequences (native). A prompt that begins like
    one of them, as a second turn does, is computed from where they part; those used longest ago make room, and a new
    version of the weights drops all. 0: none are kept and no memory is taken.
    """


class EvalConfig(Section):
    """Validation on held-out prompts, with its own sampling."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; also before the first and after the last. 0: only these two."""
    n: int = Field(1, ge=1)
    """Responses a prompt."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response; null: as in training."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Law of evaluation samples; greedy by default."""
    keep_samples: int = Field(64, ge=0)
    """Samples written to samples.jsonl at each evaluation."""
