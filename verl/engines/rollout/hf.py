"""transformers `generate` behind the RolloutEngine protocol, for any causal language model it can run.

`generate` does the forward passes, the cache, padding and positions. It runs greedily over scores in which our sampler
has left one token a row, so that tokens and log-probs follow the same law, seed for seed, as on every other engine.
Batching is static: a poll takes up to `max_sequences` waiting requests and runs them to their end. So a request is
either waiting or done between polls, and an abort finds it with no tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessorList

from verl.core import Completion, GenRequest
from verl.core.generation import Finish
from verl.core.protocols import Place
from verl.engines.rollout.base import Engine, Limits, SharedWeights, context_of
from verl.engines.rollout.hf_module import module_of
from verl.engines.rollout.options import Options
from verl.engines.rollout.sampling import sample
from verl.engines.rollout.sequence import Sequence as Running

_PAD = 0
"""Fills prompts on the left, behind the attention mask, and rows that are done; never read as a token."""
_UNLIMITED = 2**31
"""Context of a model whose config names none (ALiBi, state-space models)."""


class HFEngine(SharedWeights, Engine):
    """RolloutEngine on transformers. Reads the parameters of the policy where they lie (`module_of`)."""

    def __init__(
        self,
        policy: Any,
        eos_token_ids: Iterable[int],
        *,
        max_sequences: int = 256,
        max_model_len: int | None = None,
        version: int = 0,
    ):
        Options(max_sequences=max_sequences, max_model_len=max_model_len)  # refuses what is wrong
        self.policy = policy
        # A shallow copy has the same parameters and submodules, and a generation config of its own: the model's, with
        # its top-k or repetition penalty, would otherwise leak into the law.
        self._module = copy.copy(module_of(policy))
        self._module.generation_config = GenerationConfig()
        text = self._module.config.get_text_config()
        context = context_of(getattr(text, "max_position_embeddings", None) or _UNLIMITED, max_model_len)
        self.limits = Limits(text.vocab_size, context, tuple(eos_token_ids))
        self.version = version
        self._max_sequences = max_sequences
        self._waiting: list[Running] = []

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[GenRequest]) -> None:
        self._admit(requests, (s.request.id for s in self._waiting))
        self._waiting += [Running.of(r, self.limits) for r in requests]

    @torch.no_grad()
    def poll(self) -> list[Completion]:
        batch = self._waiting[: self._max_sequences]
        if not batch:
            return []
        draws = _Draws(batch, self.version)
        ids, mask = _left_padded([s.request.token_ids for s in batch], next(self._module.parameters()).device)
        with _evaluating(self._module):
            self._module.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=max(s.room for s in batch), pad_token_id=_PAD, use_cache=True
                ),
                logits_processor=LogitsProcessorList([draws]),
                stopping_criteria=StoppingCriteriaList([_Done(draws)]),
            )
        # Only now: where generate raised, every request is still waiting and nothing is lost.
        del self._waiting[: len(batch)]
        return draws.completions()

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        ids = set(request_ids)
        gone = [s for s in self._waiting if s.request.id in ids]
        self._waiting = [s for s in self._waiting if s.request.id not in ids]
        return [s.completion("abort") for s in gone]

    def commit(self, version: int) -> None:
        self.version = version

    def place(self, where: Place) -> None:
        """Nothing to do: no cache outlives a poll."""


class _Draws(LogitsProcessor):
    """Draws a token for every unfinished row and leaves only it in the scores."""

    def __init__(self, batch: Sequence[Running], version: int):
        self._version = version
        self._batch = [Running(s.request, s.ends, s.room) for s in batch]
        self._finish: list[Finish | None] = [None] * len(batch)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B, V] fp32 to [B, V] with 0 at the token drawn and -inf elsewhere."""
        picks = torch.full((len(self._batch), 1), _PAD, dtype=torch.int64)
        open_rows = [i for i, f in enumerate(self._finish) if f is None]
        if open_rows:
            tokens, logprobs = sample(scores[open_rows], [self._batch[i].draw() for i in open_rows])
            for i, token, logprob in zip(open_rows, tokens, logprobs, strict=True):
                self._finish[i] = self._batch[i].append(token, logprob, self._version)
                picks[i] = token
        return torch.full_like(scores, float("-inf")).scatter_(1, picks.to(scores.device), 0.0)

    def done(self) -> list[bool]:
        return [f is not None for f in self._finish]

    def completions(self) -> list[Completion]:
        out = []
        for s, finish in zip(self._batch, self._finish, strict=True):
            assert finish is not None, f"generate returned before {s.request.id!r} was done"
            out.append(s.completion(finish))
        return out


class _Done(StoppingCriteria):
    """Tells `generate` which rows the sampler has finished."""

    def __init__(self, draws: _Draws):
        self._draws = draws

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.tensor(self._draws.done(), device=input_ids.device)


def _left_padded(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [B, longest], prompts at the right end."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), _PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """No dropout while sampling; every submodule's own mode comes back after."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
