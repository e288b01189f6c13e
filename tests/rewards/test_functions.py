"""User functions: how they are found, and every fault of what they return."""

import numpy as np
import pytest
import torch

from verl.core import RewardError
from verl.rewards import RewardFunction

PROMPTS, RESPONSES = ["p", "q"], ["a", "bb"]


def returning(value):
    return RewardFunction("f", lambda prompts, responses: value)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ((0, -1), [0.0, -1.0]),
        ([True, False], [1.0, 0.0]),
        (np.array([1.5, 2]), [1.5, 2.0]),
        (np.array([True, False]), [1.0, 0.0]),
        ([np.float32(0.5), np.int64(3)], [0.5, 3.0]),
        ([np.bool_(True), np.array(2.0)], [1.0, 2.0]),
        (torch.tensor([1.0, 2.0], requires_grad=True), [1.0, 2.0]),
        ([torch.tensor(1.0), torch.tensor(3)], [1.0, 3.0]),
        (torch.tensor([0.5, 0.25], dtype=torch.bfloat16), [0.5, 0.25]),
    ],
)
def test_numbers_of_every_kind(value, want):
    found = returning(value).score(PROMPTS, RESPONSES)
    assert found == want and all(type(x) is float for x in found)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "returned 1 values for 2 responses"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 responses"),
        (None, "returned None; return a list of 2 numbers"),
        (1.0, "returned a float"),
        ("ab", "returned a str"),
        ({"a": 1, "b": 2}, "returned a dict"),
        ((x for x in (1, 2)), "returned a generator"),
        ([1.0, None], "row 1: None is None, not a number"),
        (["0.5", 1.0], "row 0: '0.5' is a str, not a number"),
        ([1.0, [1.0]], "row 1: [1.0] is a list, not a number"),
        ([1.0, 1j], "row 1: 1j is a complex, not a number"),
        ([float("nan"), 1.0], "row 0: nan is not a finite number"),
        ([1.0, float("-inf")], "row 1: -inf is not a finite number"),
        ([1.0, 10**400], "is not a finite number"),
        (np.array([1.0, np.nan]), "row 1: nan is not a finite number"),
        (np.zeros((2, 1)), "returned shape (2, 1); return one number a response, shape (2,)"),
        (np.float64(1.0), "returned shape ()"),
        (torch.zeros(3), "returned 3 values for 2 responses"),
        (np.array(["a", "b"]), "row 0: 'a' is a str"),
    ],
)
def test_faults_name_the_function_the_row_and_the_value(value, message):
    with pytest.raises(RewardError) as caught:
        returning(value).score(PROMPTS, RESPONSES)
    text = str(caught.value)
    assert text.startswith("reward function 'f': ") and message in text and "\n" not in text


def test_an_exception_is_named_with_its_place():
    def broken(prompts, responses):
        raise KeyError("first\nsecond")

    with pytest.raises(RewardError) as caught:
        RewardFunction.of(broken).score(PROMPTS, RESPONSES)
    text = str(caught.value)
    assert (
        "reward function 'broken': raised KeyError: " in text and "test_functions.py, line" in text and "\n" not in text
    )


def test_a_function_cannot_change_what_others_see():
    def greedy(prompts, responses):
        prompts.clear()
        responses[0] = "changed"
        return [0.0, 0.0]

    prompts, responses = list(PROMPTS), list(RESPONSES)
    RewardFunction.of(greedy).score(prompts, responses)
    assert (prompts, responses) == (PROMPTS, RESPONSES)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Scale:\n    by: float = 2.0\n"
        "    def __call__(self, prompts, responses):\n        return [self.by * len(r) for r in responses]\n"
        "length = Scale()\n"
        "def brevity(prompts, responses):\n    return [-len(r) for r in responses]\n"
        "def one_argument(responses):\n    return [0.0]\n"
        "constant = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_from_a_file_and_from_a_module(file):
    assert RewardFunction.load(f"{file}:brevity").score(PROMPTS, RESPONSES) == [-1.0, -2.0]
    assert RewardFunction.load(f"{file}:length", 0.5).score(PROMPTS, RESPONSES) == [2.0, 4.0]
    loaded = RewardFunction.load("my_rewards:brevity", 0.5)
    assert (loaded.name, loaded.weight) == ("brevity", 0.5)


def test_paths_that_do_not_load(file, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import json\n\nx = 1 / 0\n")
    needs = tmp_path / "needs_missing.py"
    needs.write_text("import not_installed_anywhere\n")
    cases = {
        "brevity": "'brevity' is not FILE.py:NAME or package.module:NAME",
        f"{file}:": "is not FILE.py:NAME",
        f"{tmp_path}/none.py:f": "no such file",
        f"{file}:brevty": "has no 'brevty' (did you mean 'brevity'?)",
        f"{file}:constant": "it is of type int and cannot be called",
        f"{file}:one_argument": "must take (prompts, responses), but its arguments are (responses)",
        f"{bad}:f": "raised ZeroDivisionError: division by zero (bad.py, line 3)",
        f"{needs}:f": "raised ModuleNotFoundError: No module named 'not_installed_anywhere'",
        "needs_missing:f": "importing needs_missing raised ModuleNotFoundError",
        "no_such_package.sub:f": "no module 'no_such_package'; install it, or give a path FILE.py",
    }
    for path, message in cases.items():
        with pytest.raises(RewardError) as caught:
            RewardFunction.load(path)
        assert message in str(caught.value) and "\n" not in str(caught.value), path


def test_weights_are_finite():
    with pytest.raises(RewardError, match="weight=nan must be a finite number"):
        RewardFunction.of(lambda prompts, responses: [], float("nan"))


def test_a_function_that_exits_does_not_end_the_run_as_a_success():
    def leave(prompts, responses):
        raise SystemExit(0)

    with pytest.raises(RewardError, match=r"'leave': raised SystemExit"):
        RewardFunction.of(leave).score(PROMPTS, RESPONSES)


def test_a_script_that_exits_on_import(tmp_path):
    (tmp_path / "r.py").write_text("def f(p, r): ...\nraise SystemExit(0)\n")
    with pytest.raises(RewardError, match="importing .* raised SystemExit"):
        RewardFunction.load(f"{tmp_path / 'r.py'}:f")


def test_an_async_function_is_refused_before_it_is_needed():
    async def f(prompts, responses):
        return [1.0] * len(responses)

    with pytest.raises(RewardError, match="async"):
        RewardFunction.of(f)
