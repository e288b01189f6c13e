"""Choosing a backend: what it says when it cannot serve."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rollout import tiny
from verl.config.rollout import RolloutConfig
from verl.core import ConfigError, RolloutError, SamplingParams, VerlError
from verl.engines import rollout


def test_unknown_backend_names_the_known_ones(folders: Callable[..., Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout backend: unknown name 'vlm'.*did you mean 'vllm'.*hf, native, vllm"
    ):
        rollout.load("vlm", folders())


def test_vllm_says_what_to_use_instead(folders: Callable[..., Path]) -> None:
    with pytest.raises(RolloutError, match=r"not part of this version.*native or hf"):
        rollout.load("vllm", folders(), tensor_parallel_size=2)


def test_unknown_option_names_the_known_ones(folders: Callable[..., Path]) -> None:
    with pytest.raises(RolloutError, match=r"'native' has no option 'max_seqs'.*max_sequences, prefill_tokens"):
        rollout.load("native", folders(), max_seqs=3)


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize("length", [1, tiny.CONTEXT + 1])
def test_context_beyond_the_model_is_refused(folders: Callable[..., Path], backend: str, length: int) -> None:
    with pytest.raises(RolloutError, match=rf"max_model_len={length} must be between 2 and the {tiny.CONTEXT}"):
        rollout.load(backend, folders(), dtype="float32", device="cpu", max_model_len=length)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype.*float16"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"prefill_tokens": 0}, "prefill_tokens=0"),
    ],
)
def test_bad_arguments_are_one_line(folders: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(VerlError, match=message) as error:
        rollout.load("native", folders(), **{"dtype": "float32", "device": "cpu", **options})
    assert "\n" not in str(error.value)


def test_native_refuses_a_policy_of_transformers() -> None:
    class Foreign:
        implementation = "transformers"

        class source:
            eos_token_ids = (2,)

        def parameters(self) -> tuple[()]:
            return ()

    with pytest.raises(RolloutError, match=r"rollout.backend=hf"):
        rollout.attach("native", Foreign(), RolloutConfig())


def test_hf_serves_an_architecture_that_is_not_native(folders: Callable[..., Path], reference: Any) -> None:
    prompts = [(1, 7, 9, 11, 30, 22, 17), (1, 44), (1, 3, 3, 3)]
    engine = rollout.load("hf", folders("gpt2"), dtype="float32", device="cpu")
    for prompt, c in zip(prompts, engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12)), strict=True):
        assert c.token_ids == tiny.greedy(reference("gpt2"), prompt, 12)
    done = engine.generate(prompts, SamplingParams(temperature=0.6, max_tokens=12, seed=1))
    for prompt, c in zip(prompts, done, strict=True):
        law = tiny.laws(reference("gpt2"), prompt, c.token_ids, 0.6)
        np.testing.assert_allclose(c.logprobs, law[range(len(c.token_ids)), list(c.token_ids)], atol=1e-4)


def test_the_models_generation_config_is_left_alone(folders: Callable[..., Path], reference: Any) -> None:
    """A loaded module may be given; the engine must not change what its owner set on it."""
    module = reference()
    before = module.generation_config
    engine = rollout.load("hf", module, dtype="float32", device="cpu")
    first = engine.generate([(1, 2, 3)], SamplingParams(max_tokens=2))
    native = rollout.load("native", module, dtype="float32", device="cpu")
    around: Any = rollout.attach("hf", native.policy, RolloutConfig())
    assert around.generate([(1, 2, 3)], SamplingParams(max_tokens=2))[0].token_ids == first[0].token_ids
    assert module.generation_config is before and before.repetition_penalty == 1.7


def test_bfloat16_runs_and_reports_its_own_law(folders: Callable[..., Path]) -> None:
    for backend in ("native", "hf"):
        engine = rollout.load(backend, folders(), dtype="bfloat16", device="cpu")
        done = engine.generate([(1, 7, 9), (1, 4)], SamplingParams(max_tokens=8, min_tokens=8), n=2)
        assert all(len(c.token_ids) == 8 and all(p < 0 for p in c.logprobs) for c in done)


def test_asking_for_native_does_not_import_the_others(folders: Callable[..., Path]) -> None:
    """And importing the package imports no model code at all."""
    code = (
        "import sys; from verl.engines import rollout; assert 'torch' not in sys.modules;"
        f"rollout.load('native', {str(folders())!r}, dtype='float32', device='cpu');"
        "assert 'verl.engines.rollout.hf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
