"""From token losses to one number: the only place that divides, by counts of the whole optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algos.segments import Segments
from verl.core.errors import ConfigError
from verl.core.registry import suggestion

MODE_DOCS = {
    "token_mean": "sum over tokens / tokens (PPO, DAPO)",
    "token_sum": "sum over tokens",
    "seq_mean_token_sum": "sum over tokens / sequences (REINFORCE of whole responses)",
    "seq_mean_token_mean": "mean over sequences of the mean over their tokens (GRPO)",
    "seq_mean_token_sum_norm": "seq_mean_token_sum / a fixed length (Dr.GRPO, arXiv:2503.20783)",
    "prompt_mean": "mean over prompts of the mean over the tokens of all their samples (ScaleRL, arXiv:2510.13786)",
}
MODES = tuple(MODE_DOCS)


@dataclass(frozen=True)
class Denominators:
    """Counts over a whole optimizer mini-batch and all ranks: counted tokens, and sequences and prompts with at least
    one of them. prompts may stay 0 where the mode is not prompt_mean.
    """

    tokens: float
    seqs: float
    prompts: float = 0.0

    @classmethod
    def of(cls, segments: Segments, group: Tensor | None = None) -> Denominators:
        """Of a whole mini-batch; group [N]: prompt of each sequence, None: each has its own."""
        counted = segments.counts > 0
        seqs = float(counted.sum())
        prompts = seqs if group is None else float(len(torch.unique(group[counted])))
        return cls(float(segments.mask.sum()), seqs, prompts)


def tokens_per_prompt(segments: Segments, group: Tensor) -> Tensor:
    """[N] counted tokens of all samples of the sequence's prompt. group [N]: prompt of a sequence, in any order."""
    place = torch.unique(group, return_inverse=True)[1]
    counts = segments.counts
    return torch.zeros_like(counts).index_add(0, place, counts)[place]


@dataclass(frozen=True)
class Aggregation:
    """mode: one of MODES; length: the fixed divisor of seq_mean_token_sum_norm (arXiv:2503.20783).

    prompt_mean (arXiv:2510.13786): mean over prompts of the mean over all counted tokens of the prompt's samples.
    """

    mode: str
    length: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            hint = suggestion(self.mode, list(MODES))
            raise ConfigError(f"algorithm.aggregation: unknown mode {self.mode!r}{hint}; known: {', '.join(MODES)}")
        if self.mode == "seq_mean_token_sum_norm" and self.length is None:
            raise ConfigError(
                "algorithm.aggregation_length: needed by seq_mean_token_sum_norm; give a number of tokens (callers of "
                "verl.algos.functional: length=...; a run takes rollout.max_response_tokens where this is null)"
            )

    def weights(
        self,
        segments: Segments,
        total: Denominators,
        dtype: torch.dtype = torch.float32,
        group_tokens: Tensor | None = None,
    ) -> Tensor:
        """[T] weight of each token in the scalar loss. Summed over all parts of a mini-batch they are its mean.

        group_tokens [N]: `tokens_per_prompt` of the whole mini-batch, for the sequences here; prompt_mean needs it.
        """
        one = segments.mask.to(dtype)
        seqs, tokens = max(total.seqs, 1.0), max(total.tokens, 1.0)
        if self.mode == "token_mean":
            return one / tokens
        if self.mode == "token_sum":
            return one
        if self.mode == "seq_mean_token_mean":
            return one / segments.counts.clamp(min=1)[segments.seq] / seqs
        if self.mode == "seq_mean_token_sum":
            return one / seqs
        if self.mode == "prompt_mean":
            assert group_tokens is not None and (total.prompts > 0 or not segments.mask.any())
            return one / group_tokens.clamp(min=1).to(dtype)[segments.seq] / max(total.prompts, 1.0)
        assert self.length is not None
        return one / seqs / self.length

    def __call__(
        self, loss: Tensor, segments: Segments, total: Denominators, group_tokens: Tensor | None = None
    ) -> Tensor:
        """The scalar that backward starts from: this part's share of the mini-batch's loss."""
        return (segments.zero(loss) * self.weights(segments, total, loss.dtype, group_tokens)).sum()
