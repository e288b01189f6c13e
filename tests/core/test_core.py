"""Metrics merge exactly, registries refuse and suggest, random streams are functions of their coordinates."""

import pytest

from verl.core import Completion, ConfigError, Metrics, Registry, RolloutError, SamplingParams
from verl.core.rng import derive_seed, stream


def test_metrics_merge_is_the_metric_of_the_whole() -> None:
    a = Metrics().mean("m", 6.0, 3.0).max("x", 1.0).sum("s", 2.0).min("n", 4.0)
    b = Metrics().mean("m", 4.0, 1.0).max("x", 5.0).sum("s", 3.0).min("n", -1.0)
    assert Metrics.merge([a, b]).values_by_name() == {"m": 2.5, "x": 5.0, "s": 5.0, "n": -1.0}
    assert Metrics().mean("m", 0.0, 0.0).values_by_name() == {}
    with pytest.raises(TypeError, match="is a mean"):
        a.max("m", 1.0)


def test_registry_suggests_and_refuses_a_second_name() -> None:
    r: Registry = Registry("colour")
    r.register("green")(len)
    with pytest.raises(ConfigError, match="colour: unknown name 'gren' .did you mean 'green'"):
        r["gren"]
    with pytest.raises(ConfigError, match="registered twice"):
        r.register("green")(len)


def test_streams_depend_on_every_coordinate_and_nothing_else() -> None:
    assert derive_seed(0, "a", 1, 23) == derive_seed(0, "a", 1, 23)
    assert (
        len(
            {
                derive_seed(0, "a", 1, 23),
                derive_seed(0, "a", 12, 3),
                derive_seed(1, "a", 1, 23),
                derive_seed(0, "b", 1, 23),
            }
        )
        == 4
    )
    assert stream(3, "x", 1).integers(1 << 60) == stream(3, "x", 1).integers(1 << 60)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 0}, {"min_tokens": 200}]
)
def test_sampling_params_name_the_bad_value(bad: dict) -> None:
    with pytest.raises(RolloutError, match=f"SamplingParams.{next(iter(bad))}="):
        SamplingParams(**bad)


def test_completion_needs_a_logprob_per_token() -> None:
    with pytest.raises(RolloutError, match="2 tokens, 1 log-probs"):
        Completion("r", (1, 2), (0.0,), "stop", (0, 0))
