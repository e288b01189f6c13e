"""The sum and its parts, and which sources are chosen."""

import numpy as np
import pytest

from verl.config.reward import RewardConfig, RewardFunctionConfig
from verl.core import ConfigError, Prompt, RewardError
from verl.rewards import VERIFIERS, RewardComposer, RewardFunction, Rewards, build_rewards


def prompts(*pairs):
    return [Prompt(str(i), (1,), f"text {i}", reference=ref, source=src) for i, (ref, src) in enumerate(pairs)]


def length(prompts, responses):
    return [len(r) for r in responses]


def texts_of(prompts, responses):
    assert prompts == ["text 0", "text 1"]
    return [0.0, 0.0]


TWO = prompts(("5", "gsm8k"), ("7", "openai/gsm8k"))


def test_total_and_parts_against_a_loop():
    data = prompts(("a", None), ("b", None), ("c", None))
    functions = [RewardFunction("one", length, 0.5), RewardFunction("two", lambda p, r: [3.0, -1.0, 0.25], -2.0)]
    composer = RewardComposer(functions, {None: VERIFIERS["exact"].fn}, reward_model=True)
    responses, model = ["a", "xyz", "c"], np.array([0.1, 0.2, 0.3], dtype=np.float32)
    rewards = composer.score(data, responses, model)
    assert rewards.parts["verifier"] == [1.0, 0.0, 1.0]
    assert rewards.parts["one"] == [1.0, 3.0, 1.0] and rewards.parts["two"] == [3.0, -1.0, 0.25]
    assert list(rewards.parts) == composer.names == ["reward_model", "verifier", "one", "two"]
    for row in range(3):
        want = float(model[row]) + rewards.parts["verifier"][row] + 0.5 * len(responses[row])
        want += -2.0 * [3.0, -1.0, 0.25][row]
        assert rewards.total[row] == pytest.approx(want, abs=1e-12)


def test_functions_see_prompt_texts():
    RewardComposer([RewardFunction.of(texts_of)]).score(TWO, ["1", "2"])


def test_a_subset_scores_as_within_the_whole():
    composer = build_rewards(RewardConfig(), TWO)
    whole = composer.score(TWO, ["5", "5"])
    assert whole.total == [1.0, 0.0]
    assert composer.score(TWO[1:], ["7"]).total == [1.0]
    assert composer.score([], []).total == []


def test_names_do_not_collide():
    def verifier(prompts, responses):
        return [0.0 for _ in responses]

    composer = RewardComposer([RewardFunction.of(f) for f in (length, length, verifier)], reward_model=True)
    assert composer.names == ["reward_model", "length", "length_2", "verifier_2"]


def test_bad_model_scores_are_named():
    composer = RewardComposer(reward_model=True)
    with pytest.raises(RewardError, match="reward model: row 1: nan is not a finite number"):
        composer.score(TWO, ["", ""], [0.0, float("nan")])
    with pytest.raises(RewardError, match="reward model: returned 1 values for 2 responses"):
        composer.score(TWO, ["", ""], [0.0])


def test_model_scores_come_exactly_where_there_is_a_model():
    with pytest.raises(AssertionError):
        RewardComposer(reward_model=True).score(TWO, ["", ""])
    with pytest.raises(AssertionError):
        RewardComposer([RewardFunction.of(length)]).score(TWO, ["", ""], [0.0, 0.0])


def test_a_verifier_that_raises_or_returns_nonsense_is_named():
    def raises(response, prompt):
        raise IndexError("no digit")

    for verifier, message in (
        (raises, "verifier 'gsm8k': row 0, prompt '0': raised IndexError: no digit (test_composer.py, line"),
        (lambda r, p: None, "verifier 'gsm8k': row 0: None is None, not a number"),
        (lambda r, p: float("inf"), "verifier 'gsm8k': row 0: inf is not a finite number"),
    ):
        with pytest.raises(RewardError) as caught:
            RewardComposer(verifiers={"gsm8k": verifier}).score(TWO[:1], ["x"])
        assert message in str(caught.value)


def test_auto_takes_the_data_set_s_verifier_unless_something_else_scores(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("def f(prompts, responses):\n    return [1.0] * len(responses)\n")
    by_path = (RewardFunctionConfig(path=f"{file}:f", weight=0.25),)
    assert build_rewards(RewardConfig(), TWO).names == ["verifier"]
    assert build_rewards(RewardConfig(model_path="m"), TWO).names == ["reward_model"]
    assert build_rewards(RewardConfig(), TWO, reward_model=True).names == ["reward_model"]
    assert build_rewards(RewardConfig(functions=by_path), TWO).names == ["f"]
    assert build_rewards(RewardConfig(), TWO, [RewardFunction.of(length)]).names == ["length"]
    forced = RewardConfig(model_path="m", functions=by_path, verifier="exact")
    assert build_rewards(forced, TWO).names == ["reward_model", "verifier", "f"]
    assert build_rewards(RewardConfig(functions=by_path), TWO).score(TWO, ["", ""]).total == [0.25, 0.25]


def test_nothing_scores():
    plain = prompts((None, None))
    for cfg in (RewardConfig(), RewardConfig(verifier="off")):
        with pytest.raises(ConfigError) as caught:
            build_rewards(cfg, plain)
        for flag in ("--reward_model_path", "reward.functions", "--dataset_name reasoning_gym:TASK"):
            assert flag in str(caught.value)


def test_unknown_sources_are_listed_with_counts():
    data = prompts(("1", "gsm8k"), ("1", "b/x"), ("1", "a/y"), ("1", "a/y"), (None, None))
    with pytest.raises(RewardError) as caught:
        build_rewards(RewardConfig(), data)
    text = str(caught.value)
    assert "a/y (2 prompts), b/x (1 prompts), rows without a source (1 prompts)" in text
    assert "known: exact, gsm8k, math, reasoning_gym" in text and "gsm8k (" not in text


def test_a_bad_reference_shows_before_any_rollout():
    with pytest.raises(RewardError, match="prompt '0': the verifier needs a reference answer as text, found None"):
        build_rewards(RewardConfig(verifier="exact"), prompts((None, None)))
    with pytest.raises(ConfigError, match="reward.verifier: unknown name 'exat' \\(did you mean 'exact'"):
        build_rewards(RewardConfig(verifier="exat"), TWO)


def test_every_reference_of_a_quick_verifier_is_tried():
    with pytest.raises(RewardError, match="prompt '2': verifier gsm8k needs a number"):
        build_rewards(RewardConfig(), prompts(("1", "gsm8k"), ("2", "gsm8k"), ("", "gsm8k")))


def test_weights_are_told_and_parts_can_be_added_taken_and_joined():
    functions = [RewardFunction("one", length, 0.5)]
    rewards = RewardComposer(functions, {None: VERIFIERS["exact"].fn}).score(
        prompts(("a", None), ("b", None)), ["a", ""]
    )
    assert rewards.weights == {"verifier": 1.0, "one": 0.5} and rewards.total == [1.5, 0.0]
    more = rewards.with_part("extra", [2.0, 4.0], 0.25)
    assert more.total == [2.0, 1.0] and more.parts["extra"] == [2.0, 4.0] and rewards.total == [1.5, 0.0]
    for row, total in enumerate(more.total):
        assert sum(more.weights[name] * values[row] for name, values in more.parts.items()) == pytest.approx(total)
    assert more.take([1, 1, 0]).total == [1.0, 1.0, 2.0] and more.take([]).parts["extra"] == []
    assert more.take([1]).parts == {"verifier": [0.0], "one": [0.0], "extra": [4.0]}
    joined = Rewards.concat([more, more.take([1])])
    assert joined.total == [2.0, 1.0, 1.0] and joined.weights == more.weights
    assert joined.parts["one"] == [1.0, 0.0, 0.0]


def test_the_name_of_length_shaping_is_taken():
    composer = RewardComposer([RewardFunction("overlong", length, 1.0)])
    assert composer.names == ["overlong_2"]
