"""A sampled sequence with the provenance of every token."""

from __future__ import annotations

from dataclasses import dataclass

from verl.core.generation import Completion, Finish
from verl.core.prompt import Prompt


@dataclass(frozen=True)
class Trajectory:
    """Prompt and response as one token sequence of length L.

    loss_mask: 1 where the policy drew the token; made here, never inferred from ids.
    logprobs: of the sampler, 0 where loss_mask is 0.
    """

    group_id: int
    sample_id: int
    prompt: Prompt
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    versions: tuple[int, ...]
    response_text: str

    @classmethod
    def of(
        cls, prompt: Prompt, completion: Completion, response_text: str, group_id: int, sample_id: int
    ) -> Trajectory:
        head = len(prompt.token_ids)
        return cls(
            group_id=group_id,
            sample_id=sample_id,
            prompt=prompt,
            token_ids=tuple(prompt.token_ids) + completion.token_ids,
            loss_mask=(0,) * head + (1,) * len(completion.token_ids),
            logprobs=(0.0,) * head + completion.logprobs,
            finish=completion.finish,
            versions=completion.versions,
            response_text=response_text,
        )

    @property
    def response_length(self) -> int:
        return sum(self.loss_mask)
