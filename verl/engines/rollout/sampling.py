"""Drawing one token for each row, under each row's own law, by inversion of its cumulative distribution.

Legend: B rows, V vocabulary. A row's law: logits / temperature, end tokens removed before `min_tokens`, then top-k,
then top-p of what top-k kept, renormalised. Ties are ranked by token id, so a law never depends on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.core import RolloutError, SamplingParams
from verl.engines.rollout.kernels import Kernels
from verl.engines.rollout.uniform import uniforms

_BLOCK = 256
"""Inversion finds a block of this many tokens, then the token in it: the vocabulary is summed, not scanned."""
_HEAD = 512
"""top-p looks for its mass among this many most probable tokens, and sorts the whole row only where that fails."""


@dataclass(frozen=True)
class Draw:
    """What one row asks for: `index` counts the tokens drawn so far, `banned` are ids that cannot be drawn now."""

    name: str
    params: SamplingParams
    index: int
    banned: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the law is the model's whole tempered one, less what is banned."""
        p = self.params
        return p.temperature > 0 and p.top_k == 0 and p.top_p == 1


def sample(logits_BV: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Token ids [B] and their fp32 log-probs [B] under the law drawn from.

    Greedy rows: the most probable token, and its log-prob under the model's own law at temperature 1.
    Raises RolloutError naming the request where logits are NaN or infinite, or where nothing is left to draw.
    """
    greedy = [d.params.temperature == 0 for d in draws]
    x_BV = logits_BV.to(torch.float32, copy=True)
    _temper(x_BV, [1.0 if g else d.params.temperature for g, d in zip(greedy, draws, strict=True)])
    picks_G = _greedy(x_BV, draws, greedy)
    _ban(x_BV, [() if g else d.banned for g, d in zip(greedy, draws, strict=True)])
    _truncate(x_BV, draws, greedy)
    top_B = x_BV.amax(-1, keepdim=True)
    mass_BV = (x_BV - top_B).exp_()
    total_B = mass_BV.sum(-1)
    _check(total_B, top_B[:, 0], draws)
    u_B = torch.from_numpy(uniforms([d.params.seed for d in draws], [d.index for d in draws])).to(x_BV.device)
    ids_B = invert(mass_BV, u_B)
    if picks_G is not None:
        ids_B[_rows(greedy, x_BV.device)] = picks_G
    logp_B = x_BV.gather(1, ids_B[:, None])[:, 0] - top_B[:, 0] - total_B.log()
    return ids_B.tolist(), logp_B.tolist()


def sample_whole(logits_BV: Tensor, draws: Sequence[Draw], kernels: Kernels) -> tuple[list[int], list[float]]:
    """As `sample`, for rows that are all `whole`, in one pass over bf16 logits (which it may write into)."""
    _ban(logits_BV, [d.banned for d in draws])
    temperatures = torch.tensor([d.params.temperature for d in draws], dtype=torch.float32)
    u = torch.from_numpy(uniforms([d.params.seed for d in draws], [d.index for d in draws]))
    ids, logps = kernels.draw(logits_BV, temperatures, u)
    if bool((ids < 0).any()):
        _check(torch.where(ids < 0, torch.nan, 0.0), logits_BV.amax(-1), draws)
    return ids.tolist(), logps.tolist()


def invert(mass_BV: Tensor, u_B: Tensor) -> Tensor:
    """[B] the token at which the running sum of unnormalised fp32 `mass_BV` passes the share `u_B` of the total.

    u_B: float64 in [0, 1). A token of mass 0 is never returned.
    """
    rows, vocab = mass_BV.shape
    pad = -vocab % _BLOCK
    # Blocks are summed in fp32 and scanned in float64: exact enough for any vocabulary, and no [B, V] float64 is made.
    blocks = (torch.nn.functional.pad(mass_BV, (0, pad)) if pad else mass_BV).view(rows, -1, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    target_B = u_B * ends[:, -1]
    block_B = _first_above(ends, target_B)
    inside = blocks[torch.arange(rows, device=mass_BV.device), block_B].double()
    before_B = torch.nn.functional.pad(ends, (1, 0)).gather(1, block_B[:, None])[:, 0]
    return block_B * _BLOCK + _first_above(inside.cumsum(-1), target_B - before_B)


def _first_above(ends: Tensor, target_B: Tensor) -> Tensor:
    """[B] first place of a running sum above the target; where rounding leaves none, the last place that adds mass."""
    first = (ends <= target_B[:, None]).sum(-1)
    last = (ends < ends[:, -1:]).sum(-1)
    return torch.minimum(first, last)


def _temper(x_BV: Tensor, temperatures: list[float]) -> None:
    if any(t != 1.0 for t in temperatures):
        x_BV.div_(torch.tensor(temperatures, dtype=torch.float32, device=x_BV.device)[:, None])


def _greedy(x_BV: Tensor, draws: Sequence[Draw], greedy: list[bool]) -> Tensor | None:
    """Most probable allowed token of the greedy rows, or None without any."""
    if not any(greedy):
        return None
    banned = [d.banned for g, d in zip(greedy, draws, strict=True) if g]
    mine = x_BV if all(greedy) and not any(banned) else x_BV[_rows(greedy, x_BV.device)]
    _ban(mine, banned)
    picks_G = mine.argmax(-1)
    if any(banned):
        best_G = mine.gather(1, picks_G[:, None])[:, 0]
        asked = [d for g, d in zip(greedy, draws, strict=True) if g]
        _check(torch.where(best_G == -torch.inf, torch.nan, 0.0), best_G, asked)
    return picks_G


def _ban(x_BV: Tensor, banned: list[tuple[int, ...]]) -> None:
    rows = [row for row, ids in enumerate(banned) for _ in ids]
    if rows:
        x_BV[rows, [i for ids in banned for i in ids]] = float("-inf")


def _truncate(x_BV: Tensor, draws: Sequence[Draw], greedy: list[bool]) -> None:
    """Top-k and top-p, in place, on the rows that ask for them."""
    vocab = x_BV.shape[1]
    cut = [not g and (0 < d.params.top_k < vocab or d.params.top_p < 1) for g, d in zip(greedy, draws, strict=True)]
    if not any(cut):
        return
    rows = _rows(cut, x_BV.device)
    wants = [d.params for c, d in zip(cut, draws, strict=True) if c]
    x_RV = x_BV[rows]
    ks = torch.tensor([min(p.top_k or vocab, vocab) for p in wants], device=x_RV.device)
    ps = torch.tensor([p.top_p for p in wants], dtype=torch.float64, device=x_RV.device)
    x_BV[rows] = keep_top(x_RV, ks, ps)


def keep_top(x_RV: Tensor, k_R: Tensor, p_R: Tensor) -> Tensor:
    """[R, V] logits with -inf outside the `k` most probable and, of these, outside the smallest set of mass `p`."""
    vocab = x_RV.shape[1]
    width = min(vocab, _HEAD)
    whole_R = x_RV.logsumexp(-1)
    count_R, floor_R, done_R = _count(x_RV.topk(width).values, vocab, whole_R, k_R, p_R)
    if not bool(done_R.all()):
        wide = ~done_R
        ranked = x_RV[wide].sort(-1, descending=True).values
        count_R[wide], floor_R[wide], _ = _count(ranked, vocab, whole_R[wide], k_R[wide], p_R[wide])
    kept = x_RV >= floor_R[:, None]
    extra_R = kept.sum(-1) - count_R  # more than asked for where logits tie at the floor
    for row in (extra_R > 0).nonzero()[:, 0].tolist():
        ties = (x_RV[row] == floor_R[row]).nonzero()[:, 0]
        kept[row, ties[-int(extra_R[row]) :]] = False
    return x_RV.masked_fill_(~kept, float("-inf"))


def _count(top_RW: Tensor, vocab: int, whole_R: Tensor, k_R: Tensor, p_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many tokens stay, the smallest logit that stays, and whether the W most probable were enough to know."""
    width = top_RW.shape[1]
    rank = torch.arange(width, device=top_RW.device)
    share = (top_RW - whole_R[:, None]).double().exp()
    share = share.masked_fill(rank >= k_R[:, None], 0.0)
    ends = share.cumsum(-1)
    all_here_R = (k_R <= width) if width < vocab else torch.ones_like(k_R, dtype=torch.bool)
    mass_R = torch.where(all_here_R, ends[:, -1], torch.ones_like(p_R))
    stays = ((ends - share) < (p_R * mass_R)[:, None]) & (rank < k_R[:, None])
    stays[:, 0] = True
    kept_R = torch.where((p_R < 1)[:, None], stays, rank < k_R[:, None]).sum(-1)
    floor_R = top_RW.gather(1, (kept_R - 1)[:, None])[:, 0]
    return kept_R, floor_R, all_here_R | ((k_R >= vocab) & (kept_R < width))


def _check(total_B: Tensor, top_B: Tensor, draws: Sequence[Draw]) -> None:
    """RolloutError where a total is not finite. top_B: each row's largest logit, -inf where nothing is left to draw."""
    bad = (~torch.isfinite(total_B)).nonzero()[:, 0].tolist()
    if not bad:
        return
    names = ", ".join(repr(draws[i].name) for i in bad[:3])
    if all(draws[i].banned and top_B[i] == -torch.inf for i in bad):
        raise RolloutError(
            f"request {names}: nothing can be drawn, as the model gives probability to end tokens only, and min_tokens "
            "keeps them from being drawn; set min_tokens=0"
        )
    raise RolloutError(
        f"request {names}: the model's logits are not finite, so nothing can be drawn; "
        "the weights have diverged (lower the learning rate) or dtype is too narrow (use float32)"
    )


def _rows(flags: list[bool], device: torch.device) -> Tensor:
    return torch.tensor([i for i, f in enumerate(flags) if f], dtype=torch.int64, device=device)
