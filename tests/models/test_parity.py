"""The native decoder computes what transformers computes, however sequences are laid out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.helpers import BF16, FP32, HF, family_batch, ragged_batch, reference_logprobs
from tests.tiny import SHAPES, make_model
from verl.core.batch import Batch
from verl.models.load import load_policy
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput
from verl.models.value import ValueModel

MakeBatch = Callable[..., Batch]
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


@pytest.mark.parametrize(("family", "options"), CASES)
def test_packed_and_shared_logprobs_are_those_of_transformers(tmp_path: Path, family: str, options: dict) -> None:
    folder = make_model(tmp_path / "m", family, **options)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    policy = load_policy(folder, FP32)
    for batch in (ragged_batch(), family_batch()):
        with torch.no_grad():
            want = reference_logprobs(reference, batch, 0.7)
            for share in (False, True):
                got, _ = token_logprobs(policy, PackedInput.of(batch, share), 0.7)
                torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert want.abs().max() > 1
    assert policy.decoder.config.num_params() == sum(p.numel() for p in reference.parameters())


def test_padded_transformers_is_the_same_law(tmp_path: Path) -> None:
    """The transformers policy pads; native packs; both give what each sequence alone gives."""
    for family in ("mistral", "qwen3", "gpt2"):
        folder = make_model(tmp_path / family, family)
        reference = AutoModelForCausalLM.from_pretrained(folder).eval()
        policy = load_policy(folder, HF)
        batch = ragged_batch()
        with torch.no_grad():
            got, _ = token_logprobs(policy, PackedInput.of(batch, share_prompt=False), 1.3)
            torch.testing.assert_close(got, reference_logprobs(reference, batch, 1.3), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("make_batch", [ragged_batch, family_batch])
def test_gradients_are_those_of_transformers(tmp_path: Path, family: str, share: bool, make_batch: MakeBatch) -> None:
    folder = make_model(tmp_path / "m", family)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    policy = load_policy(folder, FP32)
    batch = make_batch()
    weight = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    (reference_logprobs(reference, batch, 0.7) * weight).sum().backward()
    (token_logprobs(policy, PackedInput.of(batch, share), 0.7)[0] * weight).sum().backward()
    want = dict(reference.named_parameters())
    for name, param in policy.named_parameters():
        scale = want[name].grad.abs().max()
        assert scale > 0
        torch.testing.assert_close(param.grad, want[name].grad, atol=1e-5 * float(scale), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("make_batch", [ragged_batch, family_batch])
def test_sharing_changes_no_value_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, make_batch: MakeBatch, dtype: torch.dtype
) -> None:
    """To rounding; fp64 shows that nothing but rounding differs."""
    if dtype == torch.float64:  # norms, rotary angles and log-probs too, which are fp32 otherwise
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    policy = load_policy(make_model(tmp_path / "m", family), FP32).to(dtype)
    value = ValueModel(policy.decoder, policy.decoder.config.hidden_size, policy.source, "cpu").to(dtype)
    torch.nn.init.normal_(value.score.weight, generator=torch.Generator().manual_seed(2))
    params = [*policy.parameters(), value.score.weight]
    batch = make_batch(seed=3)
    weight = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    seen, sizes = [], []
    for share in (False, True):
        packed = PackedInput.of(batch, share)
        sizes.append(len(packed.token_ids))
        logprobs, entropy = token_logprobs(policy, packed, 0.7, entropy=True)
        assert entropy is not None
        columns = [logprobs, entropy, value.values(packed)]
        loss = (columns[0] * weight).sum() + 0.1 * columns[1].sum() + (columns[2] * weight).sum()
        seen.append([*columns, *torch.autograd.grad(loss, params)])
    assert sizes[1] < 0.8 * sizes[0]
    limit = 1e-9 if dtype == torch.float64 else 1e-5
    for plain, shared in zip(*seen, strict=True):
        assert plain.dtype == dtype
        assert float((shared - plain).detach().norm()) <= limit * float(plain.detach().norm())


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama")
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = ragged_batch()
    with torch.no_grad():
        got, _ = token_logprobs(load_policy(folder, BF16), PackedInput.of(batch, True), 1.0)
        want = reference_logprobs(reference, batch)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.25
    assert (got - want).abs().mean() < 0.02
