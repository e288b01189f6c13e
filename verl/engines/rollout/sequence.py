"""One request's life in an engine: from its prompt to a Completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.core import Completion, GenRequest
from verl.core.generation import Finish
from verl.engines.rollout.base import Limits
from verl.engines.rollout.sampling import Draw


@dataclass(eq=False)
class Sequence:
    """A request and what was drawn for it so far. `ends` finish it with `stop`, `room` tokens with `length`.

    arrival: its number among all that the engine was given. setbacks: how often its prompt was filled in in part and
    then lost, to new weights or because the cache was given back.
    """

    request: GenRequest
    ends: tuple[int, ...]
    room: int
    arrival: int = 0
    setbacks: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: GenRequest, limits: Limits, arrival: int = 0) -> Sequence:
        return cls(request, limits.ends(request.params), limits.room(request), arrival)

    @property
    def length(self) -> int:
        """Tokens of prompt and response so far."""
        return len(self.request.token_ids) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of prompt and the longest response it may get."""
        return len(self.request.token_ids) + self.room

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return (*self.request.token_ids, *self.tokens)

    def draw(self) -> Draw:
        """What the sampler must know to draw the next token."""
        params = self.request.params
        index = len(self.tokens)
        return Draw(self.request.id, params, index, self.ends if index < params.min_tokens else ())

    def append(self, token: int, logprob: float, version: int) -> Finish | None:
        """Take one drawn token; the reason if it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.ends:
            return "stop"
        return "length" if len(self.tokens) >= self.room else None

    def completion(self, finish: Finish) -> Completion:
        return Completion(self.request.id, tuple(self.tokens), tuple(self.logprobs), finish, tuple(self.versions))
