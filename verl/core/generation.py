"""Requests to a rollout engine and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.core.checked import real, token_ids, whole
from verl.core.errors import RolloutError

Finish = Literal["stop", "length", "abort"]
MIN_TEMPERATURE = 1e-4
"""Lowest above 0: the largest logits divided by it are far from the end of fp32, and no token but the best is drawn."""


def may_divide(temperature: float) -> bool:
    """Whether sampling takes it: 0 for greedy, else MIN_TEMPERATURE or more."""
    return temperature == 0 or temperature >= MIN_TEMPERATURE


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn.

    temperature: logits are divided by it, MIN_TEMPERATURE or more; 0 takes the most probable token.
    top_p: keep the smallest set of most probable tokens whose mass reaches it; 1 keeps all.
    top_k: keep this many most probable tokens; 0 keeps all.
    max_tokens: longest completion, in tokens, the end token included.
    min_tokens: no end token is drawn before this many tokens.
    stop_token_ids: end tokens besides the model's own.
    seed: of this request, any integer. The same seed, prompt and fp32 weights give the same completion whatever else is
        in the batch. In bf16 they do so only in the same company: products round by the shape of the batch, and several
        percent of completions part where a draw falls close to the border of two tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        at = "SamplingParams."
        warm = f"0 (greedy), or {MIN_TEMPERATURE:g} or more and finite"
        clean = {
            "temperature": real(f"{at}temperature", self.temperature, may_divide, warm),
            "top_p": real(f"{at}top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and at most 1"),
            "top_k": whole(f"{at}top_k", self.top_k, 0),
            "max_tokens": whole(f"{at}max_tokens", self.max_tokens, 1),
            "min_tokens": whole(f"{at}min_tokens", self.min_tokens, 0),
            "stop_token_ids": token_ids(f"{at}stop_token_ids", self.stop_token_ids),
            "seed": whole(f"{at}seed", self.seed),
        }
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise RolloutError(f"{at}min_tokens={self.min_tokens} must be between 0 and max_tokens, {self.max_tokens}")


@dataclass(frozen=True)
class GenRequest:
    """One completion asked for. Requests of one `group_id` have the same prompt, and may share its prefill.

    RolloutError, which names the request, where its prompt holds anything but integers.
    """

    id: str
    group_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", token_ids(f"request {self.id!r}: the prompt", self.token_ids))
        if not isinstance(self.params, SamplingParams):
            raise RolloutError(f"request {self.id!r}: params must be SamplingParams, got {self.params!r}")


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
