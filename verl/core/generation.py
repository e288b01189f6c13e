"""Requests to a rollout engine and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.core.errors import RolloutError

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn.

    temperature: logits are divided by it; 0 takes the most probable token.
    top_p: keep the smallest set of most probable tokens whose mass reaches it; 1 keeps all.
    top_k: keep this many most probable tokens; 0 keeps all.
    max_tokens: longest completion, in tokens, the end token included.
    min_tokens: no end token is drawn before this many tokens.
    stop_token_ids: end tokens besides the model's own.
    seed: of this request. The same seed, prompt and weights give the same completion whatever else is in the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0 and self.temperature < float("inf"), "a finite number, 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
        )
        for name, ok, want in checks:
            if not ok:
                raise RolloutError(f"SamplingParams.{name}={getattr(self, name)!r} must be {want}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


@dataclass(frozen=True)
class GenRequest:
    """One completion asked for. Requests of one `group_id` have the same prompt, and may share its prefill."""

    id: str
    group_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Completion:
    """One answer.

    token_ids: sampled tokens only, the end token included where one was drawn.
    logprobs: of each token under the law it was drawn from (after temperature, top-k, top-p and the minimum length;
        for greedy requests the model's own law at temperature 1). Same length as token_ids.
    finish: `stop` (an end token was drawn), `length` (max_tokens or the context ended it), `abort`.
    versions: weight version that drew each token. Same length as token_ids.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise RolloutError(
                f"completion {self.request_id!r}: {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions; an engine must give one of each per token"
            )
