"""Every row form, through files of every format."""

import copy
import json

import pytest

from verl.core import ConfigError, DataError

USER = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def said(content):
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json", "csv", "jsonl.gz", "csv.gz"])
def test_prompt_string(write, load, ending):
    rows = [{"prompt": "first, with a comma"}, {"prompt": "second\nline"}]
    data = load(write(f"d.{ending}", rows))
    assert [p.text for p in data.train] == ["first, with a comma", "second\nline"]
    assert [p.id for p in data.train] == ["0", "1"]
    assert data.train[0].messages == ({"role": "user", "content": "first, with a comma"},)
    assert data.train[0].source is None and data.train[0].reference is None
    assert data.report.form == "prompt"


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_prompt_messages(write, load, tokenizer, ending):
    data = load(write(f"d.{ending}", [{"prompt": [SYSTEM, USER, said("So."), {"role": "user", "content": "And?"}]}]))
    (prompt,) = data.train
    assert prompt.text == "And?"
    want = "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n"
        for m in [SYSTEM, USER, said("So."), {"role": "user", "content": "And?"}]
    )
    assert tokenizer.decode(prompt.token_ids) == want + "<|im_start|>assistant\n"


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "chosen": [USER, said("a")], "rejected": [USER, said("b")]},
        {"prompt": [USER], "chosen": [said("a")], "rejected": [said("b")]},
        {"prompt": "Why?", "chosen": "a", "rejected": "b"},
        {"chosen": [USER, said("a")], "rejected": [USER, said("b")], "score_chosen": 1.0},
        {"chosen": "\n\nHuman: Why?\n\nAssistant: a", "rejected": "\n\nHuman: Why?\n\nAssistant: b"},
    ],
)
def test_preference(write, load, row, ending):
    data = load(write(f"d.{ending}", [row]))
    assert data.report.form == "preference"
    assert data.train[0].messages == (USER,)


def test_dialogue_of_several_turns(write, load):
    text = "\n\nHuman: one\n\nHuman: two\n\nAssistant: three\n\nHuman: four"
    data = load(write("d.jsonl", [{"chosen": f"{text}\n\nAssistant: a", "rejected": f"{text}\n\nAssistant: b"}]))
    (prompt,) = data.train
    assert [(m["role"], m["content"]) for m in prompt.messages] == [
        ("user", "one\n\ntwo"),
        ("assistant", "three"),
        ("user", "four"),
    ]
    assert prompt.text == "four"


def test_alpaca(write, load):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    data = load(write("d.csv", rows))
    assert data.report.form == "alpaca"
    assert [p.text for p in data.train] == ["Add.\n\n1 2", "Say hi."]
    assert [p.reference for p in data.train] == ["3", "hi"] and data.train[0].source is None


def test_alpaca_seed_tasks_give_one_prompt_for_each_instance(write, load):
    instances = [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}]
    data = load(write("d.jsonl", [{"id": "s", "instruction": "Add.", "instances": instances}]))
    assert [p.id for p in data.train] == ["0.0", "0.1"]
    assert [p.reference for p in data.train] == ["3", "9"]
    assert (data.report.rows, data.report.prompts) == (1, 2)


def test_verl_parquet(write, load):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 3, "split": "train"},
    }
    data = load(write("d.parquet", [row]))
    (prompt,) = data.train
    assert (prompt.source, prompt.reference, dict(prompt.extra)) == (
        "openai/gsm8k",
        "72",
        {"index": 3, "split": "train"},
    )
    assert data.report.sources == {"openai/gsm8k": 1}


def test_question_answer(write, load):
    rows = [{"question": "6 * 12?", "answer": "6*12 is\n#### 72"}, {"question": "Colour?", "answer": "blue"}]
    data = load(write("d.jsonl", rows))
    assert [(p.reference, p.source) for p in data.train] == [("72", "gsm8k"), ("blue", None)]


def test_named_columns(write, load):
    path = write("d.jsonl", [{"problem": "2+2", "solution": "4", "level": 1}])
    (prompt,) = load(path, prompt_column="problem", answer_column="solution").train
    assert (prompt.text, prompt.reference, prompt.source) == ("2+2", "4", None)


def test_a_form_can_be_forced(write, load):
    path = write("d.jsonl", [{"prompt": "p", "question": "q", "answer": "a #### 1", "chosen": "x", "rejected": "y"}])
    assert load(path).report.form == "preference"
    assert load(path, form="question_answer").train[0].text == "q"


def test_generated_task(load):
    data = load("reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1", size=20, seed=3)
    again = load("reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1", size=20, seed=3)
    other = load("reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1", size=20, seed=4)
    texts = [p.text for p in data.train]
    assert len(texts) == 20 and texts == [p.text for p in again.train] and texts != [p.text for p in other.train]
    assert data.fingerprint == again.fingerprint != other.fingerprint
    prompt = data.train[0]
    left, sign, right = prompt.text.removesuffix(" =").split()[-3:]
    result = int(left) + int(right) if sign == "+" else int(left) - int(right)
    assert prompt.source == "reasoning_gym" and prompt.reference.answer == str(result)
    assert prompt.reference.score(f" {result}\n") == 1.0
    assert prompt.reference.score(f"I think <answer> {result} </answer>") == 1.0
    assert prompt.reference.score("no idea") == 0.0


BAD = [
    ({"a": 1, "b": 2}, {}, "no known form has these columns: a, b; name the prompt's with data.prompt_column=NAME"),
    (
        {"prompt": "p"},
        {"form": "alpaca"},
        "data.form=alpaca needs the columns instruction, output; instruction, output missing",
    ),
    ({"prompt": "p"}, {"prompt_column": "q"}, "no column 'q' (data.prompt_column); there are: prompt"),
    ({"prompt": "p"}, {"prompt_column": "prompt", "answer_column": "a"}, "no column 'a' (data.answer_column)"),
    ({"prompt": 1.5}, {}, "row 0: a prompt must be text or a list of messages, found 1.5"),
    ({"prompt": []}, {}, "row 0: a prompt must be text or a list of messages, found []"),
    ({"prompt": [{"from": "user", "value": "x"}]}, {}, "row 0: a chat message must be {'role': ..., 'content': ...}"),
    ({"prompt": [{"role": "user", "content": [{"image": 1}]}]}, {}, "row 0: a message's content must be text"),
    ({"chosen": "a", "rejected": "b"}, {}, "row 0: expected a dialogue that starts with '\\n\\nHuman:', found 'a'"),
    ({"chosen": [USER], "rejected": [USER]}, {}, "row 0: column 'chosen' must end with an assistant turn"),
    ({"instruction": "i", "instances": "x"}, {}, "row 0: column 'instances' must hold a list"),
    ({"instruction": None, "output": "x"}, {}, "row 0: column 'instruction' must hold text, found None"),
    ({"data_source": "s", "prompt": "p", "reward_model": "r"}, {}, "row 0: column 'reward_model' must hold"),
]


@pytest.mark.parametrize(("row", "fields", "message"), BAD)
def test_bad_rows_are_one_line(write, load, row, fields, message):
    path = write("d.jsonl", [row])
    with pytest.raises(DataError) as caught:
        load(path, **fields)
    text = str(caught.value)
    assert message in text and path in text and "\n" not in text


def test_a_later_row_without_the_column(write, load):
    with pytest.raises(DataError, match="row 1: column 'prompt' is missing; this row has: other"):
        load(write("d.jsonl", [{"prompt": "p"}, {"other": 1}]))


def test_bad_settings(write, load):
    path = write("d.jsonl", [{"prompt": "p"}])
    with pytest.raises(ConfigError, match="data.form: unknown name 'promt' \\(did you mean 'prompt'"):
        load(path, form="promt")
    with pytest.raises(ConfigError, match=r"data\.answer_column: needs data\.prompt_column"):
        load(path, answer_column="a")
    with pytest.raises(ConfigError, match=r"data\.form: cannot be combined"):
        load(path, form="prompt", prompt_column="prompt")


def test_tool_calls_survive_parquet(write, load):
    """Parquet gives both calls the keys of both; the prompt rendered must be the one that was written."""

    def call(**arguments):
        return {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}

    rows = [{"prompt": [USER, call(city="Bonn"), call(day=3), USER]}]
    (from_parquet,) = load(write("d.parquet", rows)).train
    (from_json,) = load(write("d.jsonl", rows)).train
    assert json.dumps(from_parquet.messages, sort_keys=True) == json.dumps(from_json.messages, sort_keys=True)
    assert from_parquet.messages[1]["tool_calls"][0]["arguments"] == {"city": "Bonn"}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_tools_as_json_are_those_of_the_list(write, load, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ tools[0].function.name }} {{ messages[0].content }}"
    ids = [
        load(write("d.jsonl", [{"prompt": "a", "tools": tools}]), tok=tokenizer).train[0].token_ids
        for tools in ([TOOL], json.dumps([TOOL]))
    ]
    assert ids[0] == ids[1] and tokenizer.decode(ids[0]) == "f a"


@pytest.mark.parametrize("tools", ["not json", 5, ["f"]])
def test_tools_that_are_no_schemas(write, load, tools):
    with pytest.raises(DataError, match="row 0: column 'tools' must hold a list of schemas"):
        load(write("d.jsonl", [{"prompt": "a", "tools": tools}]))


def test_rows_with_pictures_are_refused(write, load):
    with pytest.raises(DataError, match="row 1: column 'images' is not empty"):
        load(write("d.jsonl", [{"prompt": "a", "images": []}, {"prompt": "b", "images": ["b.png"]}]))
