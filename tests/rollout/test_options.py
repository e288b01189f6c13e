"""What an engine is told: wrong types and ranges are one line that names the option, before any model loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rollout import tiny
from verl.config.rollout import RolloutConfig
from verl.core import ConfigError, GenRequest, RolloutError, SamplingParams
from verl.engines import rollout
from verl.engines.rollout.memory import Grant, bytes_of

NAN, INF = float("nan"), float("inf")
COUNT = [0, -1, NAN, INF, 2.5, 2.0, True, None, "3", [4]]
WRONG = {
    "max_sequences": COUNT,
    "prefill_tokens": COUNT,
    "kv_cache_gb": [0, -1.0, NAN, INF, 10**400, True, "1", [1]],
    "prefix_cache_gb": [-1e-9, NAN, INF, None, False, "1"],
    "compile": ["maybe", True, None, ["on"]],
    "max_model_len": [1, 65, 2.5, NAN, "8", True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_one_line_that_names_the_option(
    folders: Callable[..., Path], name: str, value: object
) -> None:
    path = name if name == "max_model_len" else f"rollout.{name}"
    with pytest.raises(RolloutError, match=rf"^{path}=.* must be ") as error:
        rollout.load("native", folders(), dtype="float32", device="cpu", **{name: value})
    assert "\n" not in str(error.value)


def test_nothing_is_loaded_for_a_wrong_value() -> None:
    with pytest.raises(RolloutError, match=r"rollout\.max_sequences=nan must be 1 or more, a whole number"):
        rollout.load("hf", "no/such/model", max_sequences=NAN)


def test_any_kind_of_integer_will_do(folders: Callable[..., Path]) -> None:
    import numpy as np

    rollout.load("native", folders(), dtype="float32", device="cpu", max_sequences=np.int64(3), kv_cache_gb=1)


@pytest.mark.parametrize("device", [None, ["cpu"], 0, "gpu"])
def test_a_wrong_device_is_told(folders: Callable[..., Path], device: object) -> None:
    with pytest.raises(RolloutError, match="^device=.*it can be auto, cpu"):
        rollout.load("native", folders(), dtype="float32", device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache_gb": 1e30}, r"^rollout\.prefix_cache_gb: 1e\+30 is more than the .* GB of memory here"),
        ({"prefix_cache_gb": 1e6}, r"^rollout\.prefix_cache_gb: 1000000.0 is more than"),
        ({"prefix_cache_gb": 1e-12}, r"^rollout\.prefix_cache_gb: 1e-12 must be 0, or enough for 8 tokens"),
        ({"kv_cache_gb": 1e-300}, r"^rollout\.kv_cache_gb: 1e-300 does not hold one sequence"),
    ],
)
def test_memory_that_is_not_there_or_holds_nothing(
    folders: Callable[..., Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rollout.load("native", folders(), dtype="float32", device="cpu", **options)
    rollout.load("native", folders(), dtype="float32", device="cpu", kv_cache_gb=1e300)  # a bound, not memory


def test_grants_at_their_edges() -> None:
    """Ten bytes a token: a slot for 17 tokens takes 32 of them, a block of the prefix cache 8."""
    Grant(320 / 1e9, 80 / 1e9).check(10, have_gb=80 / 1e9, longest=17)
    with pytest.raises(ConfigError, match=r"^rollout\.kv_cache_gb: .*17 tokens; set it to 3.2e-07 or more"):
        Grant(319 / 1e9, 0.0).check(10, have_gb=1.0, longest=17)
    with pytest.raises(ConfigError, match=r"^rollout\.prefix_cache_gb: .*8e-08 or more"):
        Grant(None, 79 / 1e9).check(10, have_gb=1.0, longest=17)
    with pytest.raises(ConfigError, match=r"^rollout\.prefix_cache_gb: .*is more than"):
        Grant(None, 81 / 1e9).check(10, have_gb=80 / 1e9, longest=17)
    assert bytes_of(1e300) == int(1e300) * 10**9 and bytes_of(1.5) == 1_500_000_000


def test_a_device_that_refuses_the_prefix_cache_is_told(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.engines.rollout.prefix_cache import PrefixCache

    def refuse(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    engine = rollout.load("native", folders(), dtype="float32", device="cpu", prefix_cache_gb=0.001)
    monkeypatch.setattr(PrefixCache, "_allocate", refuse)
    with pytest.raises(RolloutError, match=r"^rollout\.prefix_cache_gb: 0\.001 GB are more than the device gives"):
        engine.generate([tuple(range(6, 20))], SamplingParams(max_tokens=2))


SET = {"prefill_tokens": 8, "kv_cache_gb": 0.5, "prefix_cache_gb": 0.5, "compile": "on"}


@pytest.mark.parametrize("name", list(SET))
def test_hf_refuses_what_only_the_native_engine_has(folders: Callable[..., Path], name: str) -> None:
    policy = rollout.load("hf", folders(), dtype="float32", device="cpu").policy  # type: ignore[attr-defined]
    cfg = RolloutConfig(backend="hf", **{name: SET[name]})
    for refuse in (lambda: rollout.attach("hf", policy, cfg), lambda: rollout.check(cfg, "auto")):
        with pytest.raises(ConfigError, match=rf"^rollout\.{name}: .* does nothing with rollout\.backend=hf"):
            refuse()
    rollout.check(RolloutConfig(backend="native", **{name: SET[name]}), "auto")
    assert (
        rollout.attach("hf", policy, RolloutConfig(backend="hf", max_sequences=2)).limits.max_model_len == tiny.CONTEXT
    )


SAMPLING = {
    "temperature": [-1, 1e-40, 9.9e-5, NAN, INF, None, "1", True],
    "top_p": [0, 1.1, NAN, "1", None],
    "top_k": [-1, 1.5, NAN, "5", None, True],
    "max_tokens": [0, 1.5, 2.0, NAN, None, "5", True],
    "min_tokens": [-1, 129, 0.5, None],
    "stop_token_ids": [5, "12", [1.5], [None], [True], None],
    "seed": [1.5, NAN, None, "3", True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SAMPLING.items() for value in values])
def test_a_wrong_sampling_value_is_one_line_that_names_it(name: str, value: object) -> None:
    with pytest.raises(RolloutError, match=rf"^SamplingParams\.{name}\b") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


def test_the_lowest_temperature_is_told_and_draws(folders: Callable[..., Path]) -> None:
    with pytest.raises(RolloutError, match=r"temperature=1e-40 must be 0 \(greedy\), or 0\.0001 or more and finite"):
        SamplingParams(temperature=1e-40)
    engine = rollout.load("native", folders(), dtype="float32", device="cpu")
    cold, greedy = (engine.generate([(1, 7, 9)], SamplingParams(temperature=t, max_tokens=9))[0] for t in (1e-4, 0))
    assert cold.token_ids == greedy.token_ids and cold.logprobs == (0.0,) * len(cold.token_ids)


def test_integers_of_every_kind_are_taken_as_ints() -> None:
    import numpy as np
    import torch

    params = SamplingParams(seed=np.int64(-3), max_tokens=np.int32(4), stop_token_ids=torch.tensor([3, 4]))  # type: ignore[arg-type]
    assert (params.seed, params.max_tokens, params.stop_token_ids) == (-3, 4, (3, 4))
    request = GenRequest("a", "g", np.array([1, 2]), params)  # type: ignore[arg-type]
    assert request.token_ids == (1, 2) and set(map(type, request.token_ids)) == {int}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1.0, 2.0]], r"^generate: prompt 0 holds 1\.0; token ids are whole numbers"),
        ([(1, 2), (1, None)], r"^generate: prompt 1 holds None"),
        ([1, 2, 3], r"^generate: prompt 0 must be a list of token ids, got 1"),
        (["What is 1 + 1 ?"], r"^generate: prompt 0 must be a list of token ids, got 'What"),
        ("What is 1 + 1 ?", r"^generate: prompts must be a list of prompts"),
        (7, r"^generate: prompts must be a list of prompts"),
    ],
)
def test_prompts_that_are_not_ids_are_told(folders: Callable[..., Path], prompts: Any, message: str) -> None:
    engine = rollout.load("native", folders(), dtype="float32", device="cpu")
    with pytest.raises(RolloutError, match=message):
        engine.generate(prompts, SamplingParams(max_tokens=2), n=2)
    for n in (0, 1.5, NAN, None):
        with pytest.raises(RolloutError, match="^generate: n=.* must be 1 or more"):
            engine.generate([(1, 2)], SamplingParams(max_tokens=2), n=n)  # type: ignore[arg-type]


def test_a_request_is_checked_by_its_name() -> None:
    with pytest.raises(RolloutError, match=r"^request 'a': the prompt holds 2\.5"):
        GenRequest("a", "g", (1, 2.5), SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match=r"^request 'a': params must be SamplingParams, got None"):
        GenRequest("a", "g", (1, 2), None)  # type: ignore[arg-type]
