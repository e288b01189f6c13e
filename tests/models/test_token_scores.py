"""sum_pi_squared, and logits in fp32 over a bf16 model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import verl.models.logprobs as logprobs_module
from tests.models.helpers import BF16, FP32, HF, batch_of, family_batch, ragged_batch, rows_of
from tests.models.test_packed import Table
from tests.tiny import make_model
from verl.config.models import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.core import ConfigError, GenRequest, SamplingParams
from verl.engines.rollout import attach
from verl.models.load import check_head, load_policy
from verl.models.logprobs import token_logprobs, token_scores
from verl.models.packed import PackedInput

BF16_FP32_HEAD = BF16.model_copy(update={"fp32_head": True})


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_sum_of_squared_probabilities_is_that_of_softmax(monkeypatch, rows: int, temperature: float) -> None:
    vocab = 12
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", rows * vocab)
    table = torch.randn(290, vocab, generator=torch.Generator().manual_seed(0)) * 3
    packed = PackedInput.of(ragged_batch(vocab=vocab), True)
    scores = token_scores(Table(table), packed, temperature, sum_pi_squared=True)
    law = torch.softmax(table[packed.token_ids[packed.pred]].double() / temperature, dim=-1)
    torch.testing.assert_close(scores.sum_pi_squared, packed.scatter((law**2).sum(-1).float()))
    plain = token_logprobs(Table(table), packed, temperature)
    assert torch.equal(scores.logprobs, plain[0]) and scores.entropy is None
    assert token_scores(Table(table), packed, temperature).sum_pi_squared is None


def test_squares_of_a_sharp_and_of_a_flat_law() -> None:
    table = torch.tensor([[1000.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, float("-inf"), float("-inf")]])
    packed = PackedInput.of(batch_of([[0, 1, 2, 3]], [[0, 1, 1, 1]], [0]), False)
    got = token_scores(Table(table.requires_grad_()), packed, 1.0, sum_pi_squared=True)
    assert got.sum_pi_squared is not None and not got.sum_pi_squared.requires_grad
    torch.testing.assert_close(got.sum_pi_squared, torch.tensor([0.0, 1.0, 0.25, 0.5]))


@pytest.mark.parametrize("tied", [True, False])
def test_fp32_head_gives_the_fp32_product_of_bf16_weights(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path / "m", tied=tied)
    policy = load_policy(folder, BF16_FP32_HEAD)
    packed = PackedInput.of(family_batch(), True)
    with torch.no_grad():
        features = policy.features(packed)
        logits = policy.logits(features)
    assert features.dtype == policy.head.dtype == torch.bfloat16 and logits.dtype == torch.float32
    want = (features.double() @ policy.head.double().T).float()
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
    plain = load_policy(folder, BF16).logits(features).detach()
    assert plain.dtype == torch.bfloat16 and float((plain.detach().float() - want).abs().max()) > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_reach_the_bf16_weights_through_an_fp32_head(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path / "m", tied=tied)
    packed = PackedInput.of(family_batch(), True)
    grads = []
    for cfg in (BF16_FP32_HEAD, FP32):
        policy = load_policy(folder, cfg)
        token_logprobs(policy, packed, 1.0)[0].sum().backward()
        grads.append({name: p.grad for name, p in policy.named_parameters()})
    for name, got in grads[0].items():
        want = grads[1][name]
        assert got is not None and got.dtype == torch.bfloat16
        assert float((got.float() - want).norm() / want.norm()) < 0.05, name


def test_fp32_head_brings_sampler_and_trainer_together(tmp_path: Path) -> None:
    """Logits of real models have a large part in common, which softmax takes off again: bf16 rounds by its size."""
    folder = make_model(tmp_path / "m", tied=False)
    common = 4 * torch.randn(32, generator=torch.Generator().manual_seed(0))
    prompts = [tuple(range(4 + i, 12 + i)) for i in range(24)]
    gaps = {}
    for cfg in (BF16, BF16_FP32_HEAD):
        policy = load_policy(folder, cfg)
        with torch.no_grad():
            policy.head.add_(common)
        engine = attach("native", policy, RolloutConfig())
        engine.submit(
            [GenRequest(str(i), str(i), p, SamplingParams(max_tokens=16, seed=i)) for i, p in enumerate(prompts)]
        )
        done = {}
        while len(done) < len(prompts):
            done |= {c.request_id: c for c in engine.poll()}
        answers = [done[str(i)] for i in range(len(prompts))]
        batch = batch_of(
            [[*p, *c.token_ids] for p, c in zip(prompts, answers, strict=True)],
            [[0] * len(p) + [1] * len(c.token_ids) for p, c in zip(prompts, answers, strict=True)],
            list(range(len(prompts))),
        )
        with torch.no_grad():
            scored = token_logprobs(policy, PackedInput.of(batch, True), 1.0)[0][rows_of(batch)]
        sampled = torch.tensor([x for c in answers for x in c.logprobs])
        gaps[cfg.fp32_head] = float((scored - sampled).abs().mean())
    assert gaps[True] < 0.5 * gaps[False], gaps


@pytest.mark.parametrize("cfg", [HF, ModelConfig(implementation="auto")])
def test_fp32_head_is_native_only(tmp_path: Path, cfg: ModelConfig) -> None:
    folder = make_model(tmp_path / "m", "gpt2")
    asked = cfg.model_copy(update={"fp32_head": True})
    for refuse in (lambda: load_policy(folder, asked), lambda: check_head("actor.path", folder, asked)):
        with pytest.raises(ConfigError, match=r"^model\.fp32_head: native models only"):
            refuse()
    check_head("actor.path", folder, cfg)


@pytest.mark.parametrize("states", [1, 2, 3, 1000])
def test_rows_of_one_state_share_its_logits_and_add_up_their_gradients(monkeypatch, states: int) -> None:
    """Three samples with one prompt, two of them equal at first: against log_softmax row by row, in float64."""
    vocab = 9
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", states * vocab)
    seqs, masks = [[1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 8]], [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1]]
    packed = PackedInput.of(batch_of(seqs, masks, [0, 0, 0]), True)
    assert len(packed.pred) == 5 and len(packed.pred.unique()) < 5
    table = torch.randn(10, vocab, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(len(packed.pred), 2, generator=torch.Generator().manual_seed(1))
    grads = []
    for exact in (False, True):
        leaf = table.clone().double().requires_grad_() if exact else table.clone().requires_grad_()
        if exact:
            law = torch.log_softmax(leaf[packed.token_ids[packed.pred]] / 0.7, -1)
            logp, entropy = law.gather(1, packed.target[:, None])[:, 0], -(law.exp() * law).sum(-1)
        else:
            scores = token_scores(Table(leaf), packed, 0.7, entropy=True)
            assert scores.entropy is not None
            logp, entropy = scores.logprobs[packed.where], scores.entropy[packed.where]
        (logp * weight[:, 0] + entropy * weight[:, 1]).sum().backward()
        grads.append((logp.detach().double(), leaf.grad.double()))
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[0][1], grads[1][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), float("-inf"), 0.0, -1.0])
def test_a_temperature_that_gives_no_law_is_refused(temperature: float) -> None:
    packed = PackedInput.of(batch_of([[0, 1, 2]], [[0, 1, 1]], [0]), False)
    for score in (token_scores, token_logprobs):
        with pytest.raises(ValueError, match="log-probs need a finite temperature above 0, got"):
            score(Table(torch.randn(3, 5)), packed, temperature)
