"""Batches and references that several tests of models use."""

from __future__ import annotations

import torch

from verl.config.models import ModelConfig
from verl.core.batch import Batch, cumulative

FP32 = ModelConfig(dtype="float32", implementation="native")
BF16 = ModelConfig(dtype="bfloat16", implementation="native")
HF = ModelConfig(dtype="float32", implementation="transformers")


def batch_of(seqs: list[list[int]], masks: list[list[int]], groups: list[int]) -> Batch:
    flat = torch.tensor([t for s in seqs for t in s])
    mask = torch.tensor([m for s in masks for m in s], dtype=torch.bool)
    cu = cumulative(torch.tensor([len(s) for s in seqs]))
    return Batch(cu, {"token_ids": flat, "loss_mask": mask, "group_id": torch.tensor(groups)})


def ragged_batch(seed: int = 0, vocab: int = 290) -> Batch:
    """Two groups that share prompts (one also holds another prompt), a lone long sequence, gaps in a mask, a sequence
    without rows and one whose first token was sampled."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(0, vocab, (n,), generator=g).tolist()

    a, b, c = draw(11), draw(7), draw(30)
    seqs = [a + draw(5), b + draw(3), a + draw(1), c + draw(12), a + draw(9), draw(4), draw(6), b + draw(2)]
    masks = [
        [0] * 11 + [1] * 5,
        [0] * 7 + [1, 1, 0],
        [0] * 11 + [1],
        [0] * 30 + [1] * 12,
        [0] * 11 + [1, 1, 0, 0, 1, 1, 0, 0, 0],
        [0] * 4,
        [1] * 6,
        [0] * 7 + [1, 1],
    ]
    return batch_of(seqs, masks, [0, 1, 0, 2, 0, 3, 4, 1])


def family_batch(seed: int = 0, vocab: int = 290) -> Batch:
    """Groups whose prompts begin alike: two go on after 20 common tokens (of which one prompt ends in the middle of the
    other), one is exactly those 20, one belongs to them for 9 tokens; an unlike one; a group without rows; a sequence
    whose first token was sampled; prompts of two groups that are the same; equal samples. No token 0: transformers
    gives the embedding of padding no gradient."""
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(1, vocab, (n,), generator=g).tolist()

    root = draw(20)
    long = root + draw(15)
    prompts = [long, root + draw(6), long[:28], root, root[:9] + draw(4), draw(13), root + draw(3), [], root]
    seqs, masks, groups = [], [], []
    for group, prompt in enumerate(prompts):
        for _ in range(3):
            response = draw(int(torch.randint(1, 9, (1,), generator=g)))
            seqs.append(prompt + response)
            masks.append([0] * len(prompt) + [int(group != 6)] * len(response))
            groups.append(group)
    seqs.append(list(seqs[0]))
    masks.append(list(masks[0]))
    groups.append(0)
    return batch_of(seqs, masks, groups)


def rows_of(batch: Batch) -> torch.Tensor:
    """[T] bool: sampled and not the first of its sequence."""
    rows = batch["loss_mask"].clone()
    rows[batch.cu_seqlens[:-1]] = False
    return rows


def reference_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """[T, V]: logits that predict each token, one sequence at a time through transformers; 0 for first tokens."""
    parts = []
    for ids in batch.per_seq(batch["token_ids"]):
        logits = model(ids[None]).logits[0].float()
        parts.append(torch.cat([torch.zeros_like(logits[:1]), logits[:-1]]))
    return torch.cat(parts)


def reference_logprobs(model: torch.nn.Module, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """[T]: log-prob of each row's token, 0 elsewhere."""
    logp = torch.log_softmax(reference_logits(model, batch) / temperature, dim=-1)
    picked = logp.gather(1, batch["token_ids"][:, None]).squeeze(1)
    return torch.where(rows_of(batch), picked, 0.0)
