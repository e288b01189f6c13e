"""Lengths, hold-out and the report."""

import pytest

from tests.tiny import BOS, make_tokenizer
from verl.core import DataError

SHORT, LONG = "ab", "ab " * 40
SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def texts(prompts):
    return [p.text for p in prompts]


def test_overlong_prompts_are_dropped_and_counted(write, load):
    data = load(write("d.jsonl", [{"prompt": SHORT}, {"prompt": LONG}]), max_prompt_tokens=40)
    assert texts(data.train) == [SHORT] and data.train[0].id == "0"
    assert data.report.dropped == 1
    assert "Data: prompts dropped, longer than 40 tokens: 1" in data.report.lines()


@pytest.mark.parametrize("limit", [1, 2, 7])
@pytest.mark.parametrize("bos", [True, False])
def test_overlong_prompts_are_cut_on_the_left_behind_the_bos(write, load, limit, bos):
    tokenizer = make_tokenizer(chat=False, bos=bos)
    path = write("d.jsonl", [{"prompt": LONG}])
    (whole,) = load(path, tok=tokenizer).train
    data = load(path, tok=tokenizer, max_prompt_tokens=limit, overlong="truncate_left")
    (cut,) = data.train
    assert len(cut.token_ids) == limit and data.report.truncated == 1
    head = 1 if bos and limit > 1 else 0
    assert cut.token_ids[:head] == (BOS,) * head
    assert cut.token_ids[head:] == whole.token_ids[len(whole.token_ids) - limit + head :]


def test_the_limit_itself_fits(write, load):
    path = write("d.jsonl", [{"prompt": LONG}])
    length = len(load(path).train[0].token_ids)
    assert load(path, max_prompt_tokens=length).report.dropped == 0
    with pytest.raises(DataError, match=f"every prompt is longer than .*={length - 1}, the shortest is {length}"):
        load(path, max_prompt_tokens=length - 1)


def test_overlong_as_an_error(write, load):
    with pytest.raises(DataError, match=r"tokens, more than data\.max_prompt_tokens=40; raise it"):
        load(write("d.jsonl", [{"prompt": SHORT}, {"prompt": LONG}]), max_prompt_tokens=40, overlong="error")


def test_prompts_without_text(write, load):
    data = load(write("d.jsonl", [{"prompt": SHORT}, {"prompt": " \n"}]))
    assert texts(data.train) == [SHORT] and data.report.empty == 1
    with pytest.raises(DataError, match="all 1 prompts are without text"):
        load(write("e.jsonl", [{"prompt": ""}]))


def test_a_missing_evaluation_set_is_named_by_its_own_key(write, load):
    with pytest.raises(DataError, match=r"data\.eval_dataset=\./none: no such file or folder"):
        load(write("d.jsonl", [{"prompt": SHORT}]), eval_dataset="./none", eval_size=1)


def test_examples_are_not_the_question(write, load, tokenizer):
    """They are rendered for the policy, but verifiers, functions and a reward model see the data's own chat."""
    data = load(write("d.jsonl", [{"prompt": "Why?"}]), system_prompt="S", examples=(("q", "a"),))
    (prompt,) = data.train
    assert prompt.text == "Why?" and prompt.messages == ({"role": "user", "content": "Why?"},)
    assert "<|im_start|>user\nq<|im_end|>" in tokenizer.decode(prompt.token_ids)


def test_held_out_questions_are_never_trained_on(load):
    data = load(SUMS, size=600, eval_size=30)
    held, trained = texts(data.eval), texts(data.train)
    assert len(held) == len(set(held)) == 30
    assert not set(held) & set(trained)
    assert len(trained) + data.report.held_out == 600


def test_hold_out_does_not_depend_on_order_seed_or_length_limit(write, load):
    rows = [{"prompt": f"question {i % 50}"} for i in range(100)]
    first = load(write("a.jsonl", rows), eval_size=10)
    second = load(write("b.jsonl", rows[::-1]), eval_size=10, seed=5, system_prompt="S")
    assert set(texts(first.eval)) == set(texts(second.eval)) and len(first.eval) == 10


def test_small_data_holds_out_a_quarter_and_says_so(write, load):
    data = load(write("d.jsonl", [{"prompt": f"q{i}"} for i in range(12)]), eval_size=128)
    assert (len(data.eval), len(data.train)) == (3, 9)
    assert any("3 evaluation prompts, not data.eval_size=128" in line for line in data.report.lines())


def test_nothing_to_hold_out(write, load):
    path = write("d.jsonl", [{"prompt": "same"}] * 5)
    with pytest.raises(DataError, match="one distinct prompt, so none can be held out; set data.eval_size=0"):
        load(path, eval_size=2)
    assert len(load(path, eval_size=0).train) == 5


def test_questions_that_become_one_when_cut_are_both_left_out(write, load):
    rows = [{"prompt": f"{i} " + LONG} for i in range(8)]
    with pytest.raises(DataError, match="no prompt is left to train on"):
        load(write("d.jsonl", rows), eval_size=2, max_prompt_tokens=5, overlong="truncate_left")


def test_evaluation_set_of_its_own(write, load, tmp_path):
    write("d/train.jsonl", [{"prompt": f"t{i}"} for i in range(4)])
    write("d/test.jsonl", [{"prompt": f"e{i}"} for i in range(10)] + [{"prompt": "t1"}] * 10)
    by_split = load(str(tmp_path / "d"), eval_split="test", eval_size=4)
    assert texts(by_split.train) == ["t0", "t1", "t2", "t3"]
    assert [(p.id, p.text) for p in by_split.eval] == [
        ("eval-0", "e0"),
        ("eval-5", "e5"),
        ("eval-10", "t1"),
        ("eval-15", "t1"),
    ]
    assert any("2 of 4 evaluation prompts are also trained on" in line for line in by_split.report.lines())
    by_file = load(str(tmp_path / "d"), eval_dataset=str(tmp_path / "d" / "test.jsonl"), eval_size=4)
    assert texts(by_file.eval) == texts(by_split.eval)


def test_generated_evaluation_set_differs_from_the_training_set(load):
    big = "reasoning_gym:chain_sum?min_terms=6&max_terms=6&min_digits=4"
    data = load(big, size=20, eval_dataset=big, eval_size=20)
    assert len(data.eval) == 20 and not set(texts(data.eval)) & set(texts(data.train))


def test_dropped_evaluation_prompts_are_said(write, load):
    train = write("d.jsonl", [{"prompt": SHORT}])
    other = write("e.jsonl", [{"prompt": "x"}, {"prompt": LONG}])
    data = load(train, eval_dataset=other, eval_size=2, max_prompt_tokens=40)
    assert any("data.eval_dataset: prompts dropped: 1, cut on the left: 0" in note for note in data.report.notes)


def test_report(write, load):
    lengths = [len(p.token_ids) for p in load(write("d.jsonl", [{"prompt": "a"}, {"prompt": "a b c"}])).train]
    report = load(write("d.jsonl", [{"prompt": "a"}, {"prompt": "a b c"}])).report
    assert report.tokens == (min(lengths), sum(lengths) / 2, max(lengths))
    assert "form prompt: 2 rows, 2 prompts; 2 to train on, 0 to evaluate" in report.lines()[0]
