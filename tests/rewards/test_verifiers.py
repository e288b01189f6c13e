"""Each verifier against cases whose answer is known, and what it says of a reference that it cannot use."""

import pickle
import sys
import threading
from decimal import Decimal

import pytest

from verl.core import MissingDependency, Prompt, RewardError
from verl.data.gym import read_gym
from verl.rewards import VERIFIERS
from verl.rewards.verifiers import last_number, verifier_name


def prompt(reference, source=None):
    return Prompt("7", (1,), "q", reference=reference, source=source)


def score(name, response, reference):
    return VERIFIERS[name].fn(response, prompt(reference))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("it is 72.", "72"),
        ("1,234 apples", "1234"),
        ("1, 2, 3", "3"),
        ("costs $-3.50!", "-3.50"),
        ("12,34", "34"),
        (".5", "0.5"),
        ("8 x 9 = 72 dollars", "72"),
        ("none", None),
    ],
)
def test_last_number(text, want):
    assert last_number(text) == (None if want is None else Decimal(want))


@pytest.mark.parametrize(
    ("response", "reference", "want"),
    [
        ("So 6*12 = 72", "72", 1.0),
        ("So 72.00", "72", 1.0),
        ("#### 72", "#### 72", 1.0),
        ("#### 72 of 100", "72", 0.0),
        ("1,000", 1000, 1.0),
        ("71", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_gsm8k(response, reference, want):
    assert score("gsm8k", response, reference) == want


def test_exact():
    assert score("exact", " blue\n", "blue") == 1.0
    assert score("exact", "Blue", "blue") == 0.0


@pytest.mark.parametrize(
    ("response", "reference", "want"),
    [
        ("The answer is $\\frac{1}{2}$", "0.5", 1.0),
        ("so \\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("so \\boxed{x^2 + 2x}", "(x+1)^2", 0.0),
        ("$\\{1, 2\\}$", "\\{2, 1\\}", 1.0),
        ("", "3", 0.0),
    ],
)
def test_math(response, reference, want):
    pytest.importorskip("math_verify")
    assert score("math", response, reference) == want


def test_math_scores_alike_in_a_thread():
    """Its library sets a signal, which only the main thread may do."""
    pytest.importorskip("math_verify")
    found = []
    thread = threading.Thread(target=lambda: found.append(score("math", "$1/2$", "0.5")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_math_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingDependency, match=r"pip install \"verl\[math\]\""):
        score("math", "1", "1")


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "leg_counting"])
def test_reasoning_gym_scores_in_any_process(task):
    """The reference travels by pickle, as between processes, and gives its own answer full marks."""
    for row in read_gym(f"reasoning_gym:{task}", 5, 0).rows:
        answer = pickle.loads(pickle.dumps(row["gym"]))
        assert answer == row["gym"]
        assert score("reasoning_gym", answer.answer, answer) == 1.0
        assert score("reasoning_gym", "", answer) < 0.1


@pytest.mark.parametrize(
    ("name", "reference", "message"),
    [
        (
            "exact",
            None,
            "prompt '7': the verifier needs a reference answer as text, found None; check the answer column",
        ),
        ("gsm8k", ["72"], "found ['72']"),
        ("gsm8k", "blue", "verifier gsm8k needs a number as reference, found 'blue'"),
        ("reasoning_gym", "72", "needs a data set reasoning_gym:TASK, found the reference '72'"),
    ],
)
def test_references_that_cannot_be_used(name, reference, message):
    with pytest.raises(RewardError) as caught:
        score(name, "1", reference)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("gsm8k", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("aime2024", "math"),
        ("numina_olympiads", "math"),
        ("reasoning_gym", "reasoning_gym"),
        ("someone/else", None),
    ],
)
def test_data_sources(source, want):
    assert verifier_name(source) == want


def test_exact_reads_the_answer_of_a_generated_task() -> None:
    """The task itself gives part of the credit for a wrong text that holds the answer; `exact` gives none."""
    from verl.data.gym import GymAnswer
    from verl.rewards.verifiers import exact, reasoning_gym

    answer = GymAnswer("chain_sum", "", {"question": "2 - 1 =", "answer": "1", "metadata": {}})
    prompt = Prompt("0", (1,), "2 - 1 =", reference=answer, source="reasoning_gym")
    assert [exact(r, prompt) for r in ("1", " 1\n", "-1", "11")] == [1.0, 1.0, 0.0, 0.0]
    assert 0 < reasoning_gym("-1", prompt) < 1
