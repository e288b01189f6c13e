"""What every backend shares: which requests are refused, and `generate` over submit and poll."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verl.core import Completion, GenRequest, RolloutError, SamplingParams
from verl.core.checked import token_ids, whole
from verl.core.protocols import Place
from verl.core.rng import derive_seed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """What a model can be asked for: ids below `vocab_size`, prompt and response within `max_model_len` tokens."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def check(self, request: GenRequest) -> None:
        """Raise RolloutError naming the request where it cannot be served."""
        name, ids = request.id, request.token_ids
        if not ids:
            raise RolloutError(f"request {name!r}: the prompt is empty; give at least one token (for example BOS)")
        self._check_ids(name, "prompt", ids)
        self._check_ids(name, "SamplingParams.stop_token_ids", request.params.stop_token_ids)
        if request.params.min_tokens > 0 and len(self.ends(request.params)) == self.vocab_size:
            raise RolloutError(
                f"request {name!r}: min_tokens={request.params.min_tokens} leaves nothing to draw, as all "
                f"{self.vocab_size} tokens end a completion; set min_tokens=0, or fewer stop_token_ids"
            )
        if len(ids) >= self.max_model_len:
            raise RolloutError(
                f"request {name!r}: {len(ids)} prompt tokens leave no room for a response in a context of "
                f"{self.max_model_len}; shorten the prompt (data.max_prompt_tokens) or raise max_model_len"
            )

    def _check_ids(self, name: str, what: str, ids: Sequence[int]) -> None:
        wrong = next((t for t in ids if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise RolloutError(
                f"request {name!r}: {what} holds token id {wrong}, outside the model's vocabulary of "
                f"{self.vocab_size}; use this model's own tokenizer"
            )

    def ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Token ids that end a completion: the model's and the request's."""
        # An end token that the model has no logit for can never be drawn, so it is left out.
        own = (t for t in self.eos_token_ids if 0 <= t < self.vocab_size)
        return tuple(dict.fromkeys((*own, *params.stop_token_ids)))

    def room(self, request: GenRequest) -> int:
        """Most tokens that the request's completion can have."""
        return min(request.params.max_tokens, self.max_model_len - len(request.token_ids))


def context_of(model_limit: int, asked: int | None) -> int:
    """The context to serve: the model's, or a shorter one that is asked for. RolloutError where it is longer."""
    if asked is None:
        return model_limit
    if not 2 <= asked <= model_limit:
        raise RolloutError(f"max_model_len={asked} must be between 2 and the {model_limit} positions of this model")
    return asked


class Engine(ABC):
    """A RolloutEngine with `generate`. Subclasses give submit, poll, abort, wanted, receive, commit and place."""

    limits: Limits
    version: int

    @property
    def described(self) -> str:
        """Which code generates, for a line of the log."""
        return "transformers generate"

    @property
    @abstractmethod
    def pending(self) -> int:
        """Requests submitted and not yet returned."""

    @abstractmethod
    def submit(self, requests: Sequence[GenRequest]) -> None:
        """Queue requests, all or none. RolloutError names the first that cannot be served."""

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Advance by one scheduling step; what finished in it."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Stop these requests and return what they have. Ids that are not here (already returned) are passed over."""

    @abstractmethod
    def wanted(self) -> Sequence[str]:
        """Names of the weights to send before a commit."""

    @abstractmethod
    def receive(self, name: str, tensor: Tensor) -> None:
        """Take one named weight of the next version."""

    @abstractmethod
    def commit(self, version: int) -> None:
        """Go on with the weights as they are now, called `version`."""

    @abstractmethod
    def place(self, where: Place) -> None:
        """`released` or `host` gives the cache back; `device` needs nothing: the next poll allocates."""

    def counts(self) -> Mapping[str, int]:
        """Nothing, where an engine does not count."""
        return {}

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int = 1) -> list[Completion]:
        """`n` completions a prompt, prompt-major: those of prompt i are at [i * n, (i + 1) * n), with ids "i/j".

        n = 1 draws with `params.seed`; with more, sample j has a seed of its own, derived from `params.seed`, j and the
        prompt's tokens. So in fp32 a prompt's completions do not depend on the other prompts, nor on its place among
        them (bf16: see SamplingParams.seed).
        RolloutError while requests from `submit` are pending: their completions would be mixed in.
        """
        whole("generate: n", n, 1)
        if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__"):
            raise RolloutError(
                f"generate: prompts must be a list of prompts, each a list of token ids, got {prompts!r}"
            )
        if self.pending:
            raise RolloutError(f"generate: {self.pending} submitted requests are pending; poll until they are done")
        clean = [token_ids(f"generate: prompt {i}", ids) for i, ids in enumerate(prompts)]
        requests = [
            GenRequest(f"{i}/{j}", str(i), ids, params if n == 1 else _nth(params, j, ids))
            for i, ids in enumerate(clean)
            for j in range(n)
        ]
        self.submit(requests)
        done: dict[str, Completion] = {}
        try:
            while len(done) < len(requests):
                done.update((c.request_id, c) for c in self.poll())
        except BaseException:
            self.abort([r.id for r in requests])
            raise
        return [done[r.id] for r in requests]

    def _admit(self, requests: Sequence[GenRequest], present: Iterable[str]) -> None:
        """Refuse the whole call where one request cannot be served or its id is in use."""
        seen = set(present)
        for request in requests:
            if request.id in seen:
                raise RolloutError(
                    f"request {request.id!r}: a request of this id is already in the engine; ids must differ"
                )
            seen.add(request.id)
            self.limits.check(request)


class SharedWeights:
    """The weight side of an engine that reads the trainer's own storage: nothing is sent."""

    def wanted(self) -> Sequence[str]:
        """No names: the engine's parameters are the trainer's."""
        return ()

    def receive(self, name: str, tensor: Tensor) -> None:
        """Refuse: a weight sent here would have nowhere to go."""
        raise RolloutError(
            f"weight {name!r}: this engine reads the trainer's own weights; send nothing, call commit(version)"
        )


def _nth(params: SamplingParams, sample: int, ids: Sequence[int]) -> SamplingParams:
    return replace(params, seed=derive_seed(params.seed, "sample", sample, *ids))
