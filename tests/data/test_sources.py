"""Where rows come from: files, folders, generated sets, the hub; and what is said when they do not come."""

import gzip
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from verl.core import DataError, MissingDependency

ROWS = [{"prompt": f"question {i}"} for i in range(6)]


@pytest.mark.parametrize(
    ("files", "split", "want"),
    [
        (["train.jsonl", "test.jsonl"], "train", ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
         "train", ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (["data/train_prefs-00000-of-00001.parquet", "data/train_sft-00000-of-00001.parquet"], "train_prefs",
         ["data/train_prefs-00000-of-00001.parquet"]),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "test", ["gsm8k_test.jsonl"]),
        (["train/0.csv", "train/1.csv", "test/0.csv"], "train", ["train/0.csv", "train/1.csv"]),
        (["rows.jsonl.gz"], "train", ["rows.jsonl.gz"]),
        (["train.jsonl", "dataset_info.json", ".cache/train.json"], "train", ["train.jsonl"]),
    ],
)  # fmt: skip
def test_files_of_a_split(write, load, tmp_path, files, split, want):
    for number, name in enumerate(files):
        write(f"d/{name}", [{"prompt": f"{name} {number}"}])
    data = load(str(tmp_path / "d"), split=split)
    assert [p.text.split()[0] for p in data.train] == want


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["notes.txt"], "no data file here; expected files ending in .parquet, .jsonl, .json, .csv"),
        (["test.jsonl", "dev.jsonl"], "no file of split 'train' (data.split); files here are of: dev, test"),
        (["main/train.jsonl", "extra/train.jsonl"], "several folders hold split 'train': extra, main"),
        (["train_a.jsonl", "train_b.jsonl"], "split 'train' may mean train_a.jsonl or train_b.jsonl"),
    ],
)
def test_folders_that_leave_a_question(write, load, tmp_path, files, message):
    for name in files:
        write(f"d/{name}", ROWS)
    with pytest.raises(DataError) as caught:
        load(str(tmp_path / "d"))
    assert message in str(caught.value)


BROKEN = [
    ("d.jsonl", b'{"prompt": "a"}\n{"prompt": ', "d.jsonl, line 2: not valid JSON"),
    ("d.jsonl", b"[1, 2]\n", "d.jsonl, line 1: expected an object"),
    ("d.jsonl", b'{"prompt": "\xff\xfe"}', "d.jsonl: not UTF-8 text"),
    ("d.json", b'{"prompt": "a"}\n{"prompt": "b"}', "one object a line is .jsonl"),
    ("d.json", b'"text"', "d.json: expected a list of objects, found a str"),
    ("d.json", b"[1]", "d.json, item 1: expected an object"),
    ("d.parquet", b"not parquet", "d.parquet: not a readable parquet file"),
    ("d.csv", b"prompt,answer\na\n", "d.csv, line 2: more or fewer values"),
    ("d.csv", b"prompt\na,b\n", "d.csv, line 2: more or fewer values"),
    ("d.csv", b'prompt\n"a', "d.csv, line 1: not valid CSV"),
    ("d.jsonl.gz", b"plain text", "d.jsonl.gz: cannot be read"),
    ("d.jsonl.gz", gzip.compress(b'{"prompt": "a"}' * 99)[:-12], "d.jsonl.gz: cannot be read"),
    ("d.txt", b"x", "cannot tell the format; expected a name ending in .parquet"),
    ("d.jsonl", b"\n", "the data set is empty"),
    ("d.csv", b"prompt\n", "the data set is empty"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_broken_files_are_one_line(load, tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(str(path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_json_with_one_list_inside(tmp_path, load):
    path = tmp_path / "d.json"
    path.write_text('{"version": 1, "data": [{"prompt": "a"}]}')
    assert load(str(path)).train[0].text == "a"


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_size_takes_the_first_rows(write, load, ending):
    assert [p.text for p in load(write(f"d.{ending}", ROWS), size=2).train] == ["question 0", "question 1"]


@pytest.mark.parametrize("name", ["./missing", "missing.jsonl", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_not_there(load, name):
    with pytest.raises(DataError, match="no such file or folder; give an existing path, a hub id"):
        load(name)


GYM = [
    ("chain_sums", "no reasoning_gym task 'chain_sums' (did you mean 'chain_sum'?)"),
    ("chain_sum?min_term=2", "task chain_sum has no parameter 'min_term' (did you mean 'min_terms'?)"),
    ("chain_sum?min_terms=5&max_terms=2", "max_terms must be >= min_terms"),
    ("chain_sum?min_terms", "'min_terms' is not key=value"),
    ("chain_sum?size=3", "size is set by data.size, not in the name"),
    ("chain_sum?min_terms=2&min_terms=3", "min_terms is given twice"),
    ("chain_sum?min_terms=[", "cannot read the value of min_terms"),
    ("chain_sum?min_terms=2&max_terms=2.5", "the task cannot be drawn with these parameters ("),
    ("chain_sum?min_terms=two", "reasoning_gym:chain_sum?min_terms=two: '"),
]


@pytest.mark.parametrize(("name", "message"), GYM)
def test_bad_generated_tasks(load, name, message):
    with pytest.raises(DataError) as caught:
        load(f"reasoning_gym:{name}")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_generated_task_without_its_package(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(MissingDependency, match=r"pip install \"verl\[quickstart\]\""):
        load("reasoning_gym:chain_sum")


def test_hub_without_its_package(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingDependency, match=r"pip install \"verl\[hub\]\"; or fetch it beforehand with `hf download"
    ):
        load("org/data")


PROBE = "from verl.data.hub import probe; probe('org/data', 'data.dataset')"


def test_unreachable_hub_fails_fast_with_the_command_to_fetch():
    """In a process of its own, as the address is read at import. Port 9 of this machine refuses connections."""
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - start < 30
    line = done.stderr.strip().splitlines()[-1]
    assert "DataError: data.dataset=org/data: the hub cannot be reached (" in line
    assert "`hf download --repo-type dataset org/data --local-dir ./data/data`" in line
    assert "--dataset_name ./data/data" in line


class FakeTable(list):
    def select(self, indices):
        return FakeTable(self[i] for i in indices)


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers; `calls` keeps what was asked of the library."""
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        if args[1] == "broken":
            raise ValueError("Unknown split.\nMore lines.")
        return FakeTable(ROWS)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return calls


def test_hub_rows(load, hub):
    data = load("org/data:config", split="test", size=4)
    assert hub == [(("org/data", "config"), {"split": "test"})]
    assert [p.text for p in data.train] == [f"question {i}" for i in range(4)]


def test_hub_errors_are_one_line(load, hub):
    with pytest.raises(DataError) as caught:
        load("org/data:broken")
    assert "split 'train': Unknown split.; or fetch it beforehand" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"prompt": "a\\ud83d b"}', '[{"prompt": "a\\ud83d b"}]'])
def test_half_of_a_surrogate_pair_becomes_the_replacement_character(tmp_path, load, text):
    path = tmp_path / ("d.json" if text.startswith("[") else "d.jsonl")
    path.write_text(text)
    (prompt,) = load(str(path)).train
    assert prompt.text == "a\ufffd b"


def test_json_beyond_the_stack_is_one_line(tmp_path, load):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(DataError, match="line 1: not valid JSON"):
        load(str(path))


def test_csv_with_two_columns_of_one_name(tmp_path, load):
    path = tmp_path / "d.csv"
    path.write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match="same name"):
        load(str(path))
