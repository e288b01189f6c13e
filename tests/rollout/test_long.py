"""Sequences that outgrow the cache while they decode: it grows under them and loses nothing."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_model
from verl.core import SamplingParams
from verl.engines import rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("long"), family="llama", seed=4)  # 256 positions


@pytest.mark.parametrize("prompt_tokens", [1, 26, 63, 64, 65])
@pytest.mark.parametrize("max_sequences", [2, 256])
def test_logprobs_stay_those_of_a_full_forward(folder, prompt_tokens: int, max_sequences: int) -> None:
    """Every length from the prompt's to the context's is passed, so every multiple of the cache's step is."""
    engine = rollout.load("native", folder, dtype="float32", device="cpu", max_sequences=max_sequences)
    prompts = [[(7 * i + k) % 250 + 4 for i in range(prompt_tokens + 5 * k)] for k in range(3)]
    longest = 256 - prompt_tokens - 10
    params = SamplingParams(temperature=0.6, max_tokens=longest, min_tokens=longest - 1, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        assert len(done.token_ids) >= longest - 1
        ids = torch.tensor([*prompt, *done.token_ids])
        with torch.no_grad():
            logits = reference(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.6
        banned = torch.arange(len(logits)) < longest - 1
        for end in engine.limits.eos_token_ids:
            logits[banned, end] = float("-inf")
        want = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), want, atol=1e-4, rtol=0)
