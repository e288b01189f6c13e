"""The native decoder computes what transformers computes, however sequences are laid out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import SHAPES, make_model
from verl.config.models import ModelConfig
from verl.core.batch import Batch, cumulative
from verl.models.load import load_policy
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput

FP32 = ModelConfig(dtype="float32", implementation="native")
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 5000.0,
        "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24, "rope_theta": 500000.0,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 128, "rope_theta": 10000.0,
    },
}  # fmt: skip
CASES = [
    *[(family, {"tied": tied}) for family in SHAPES for tied in (True, False)],
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 16}),
    ("qwen3", {"attention_bias": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("mistral", {"sliding_window": None}),
    *[("llama", {"rope_parameters": rope}) for rope in ROPES.values()],
    ("qwen2", {"rope_parameters": ROPES["yarn"]}),
]


def batch_of(seqs: list[list[int]], masks: list[list[int]], groups: list[int]) -> Batch:
    flat = torch.tensor([t for s in seqs for t in s])
    mask = torch.tensor([m for s in masks for m in s], dtype=torch.bool)
    cu = cumulative(torch.tensor([len(s) for s in seqs]))
    return Batch(cu, {"token_ids": flat, "loss_mask": mask, "group_id": torch.tensor(groups)})


def ragged_batch(seed: int = 0, vocab: int = 290) -> Batch:
    """Two groups that share prompts (one with different prompts inside), one lone sequence, gaps in a mask, no-row and
    first-token-sampled sequences."""
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
    return batch_of(seqs, masks, [0, 1, 0, 2, 0, 3, 4, 0])


def reference_logprobs(model: torch.nn.Module, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """One sequence at a time through transformers."""
    out = torch.zeros(batch.num_tokens)
    mask = batch["loss_mask"]
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        ids = batch["token_ids"][start:stop]
        logp = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, dim=-1)
        for t in range(1, stop - start):
            if mask[start + t]:
                out[start + t] = logp[t - 1, ids[t]]
    return out


@pytest.mark.parametrize(("family", "options"), CASES)
def test_packed_and_shared_logprobs_are_those_of_transformers(tmp_path: Path, family: str, options: dict) -> None:
    folder = make_model(tmp_path / "m", family, **options)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    policy = load_policy(folder, FP32)
    batch = ragged_batch()
    with torch.no_grad():
        want = reference_logprobs(reference, batch, 0.7)
        for share in (False, True):
            got, _ = token_logprobs(policy, PackedInput.of(batch, share), 0.7)
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert want.abs().max() > 1
    assert policy.decoder.config.num_params() == sum(p.numel() for p in reference.parameters())
