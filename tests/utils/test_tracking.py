"""Sinks: exact numbers, rewinding, and clear words where a library is missing."""

import json
import math
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.core.errors import ConfigError, MissingDependency
from verl.utils.tracking import SINKS, Tracker, read_metrics

CONFIG = {"actor": {"optim": {"lr": 1e-6}}, "trainer": {"sinks": ["jsonl"]}}


def tracker(folder: Path, *sinks: str, resume: bool = False) -> Tracker:
    return Tracker(sinks or ("jsonl",), folder, None, CONFIG, resume)


def test_jsonl_has_a_line_a_step_at_once(tmp_path: Path) -> None:
    t = tracker(tmp_path)
    t.log({"reward": 0.25, "kl": 1e-3}, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.25, "kl": 0.001}\n'
    t.close()


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=8))
def test_jsonl_gives_back_the_same_bits(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    folder = tmp_path_factory.mktemp("run")
    t = tracker(folder)
    for i, value in enumerate(values):
        t.log({"x": value}, i + 1)
    t.rewind(len(values))
    t.close()
    got = [row["x"] for row in read_metrics(folder / "metrics.jsonl")]
    assert [(v, math.copysign(1, v)) for v in got] == [(v, math.copysign(1, v)) for v in values]


def test_jsonl_writes_strict_json_for_nan_and_infinity(tmp_path: Path) -> None:
    t = tracker(tmp_path)
    t.log({"a": math.nan, "b": math.inf, "c": -math.inf}, 1)
    t.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_rewind_and_repeat_is_the_uninterrupted_file(tmp_path: Path) -> None:
    whole, cut = tracker(tmp_path / "whole"), tracker(tmp_path / "cut")
    for step in range(6):
        whole.log({"x": step / 3}, step)
    for step in range(5):
        cut.log({"x": step / 3}, step)
    cut.close()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "x": 1.66')  # killed in the middle of a line
    again = tracker(tmp_path / "cut", resume=True)
    again.rewind(3)
    for step in (4, 5):
        again.log({"x": step / 3}, step)
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    again.rewind(0)
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == b""


def test_tensorboard_holds_the_numbers_and_drops_what_a_resume_repeats(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = tracker(tmp_path, "tensorboard")
    for step in (1, 2, 3):
        first.log({"reward": float(step)}, step)
    first.close()
    second = tracker(tmp_path, "tensorboard", resume=True)
    second.rewind(1)
    second.log({"reward": 20.0}, 2)
    second.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 1.0), (2, 20.0)]


def test_unknown_sink_has_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer.sinks: unknown sink 'tensorbord'.*'tensorboard'"):
        tracker(tmp_path, "tensorbord")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_missing_library_names_the_command(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=rf"pip install 'verl\[{name}\]'") as e:
        tracker(tmp_path, name)
    assert "\n" not in str(e.value)


def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="trainer.output_dir: cannot write in .*--output_dir"):
        tracker(tmp_path / "file" / "run")


class Recorder(types.ModuleType):
    """A stand-in for an outside library: notes every call, and answers with itself."""

    def __init__(self, name: str):
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict]] = []
        self.info = types.SimpleNamespace(run_id="id-1")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple, dict]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.mark.parametrize(("name", "log"), [("wandb", "log"), ("mlflow", "log_metrics"), ("trackio", "log")])
def test_outside_sinks_get_the_numbers(tmp_path: Path, name: str, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Recorder(name)
    monkeypatch.setitem(sys.modules, name, library)
    t = tracker(tmp_path, name)
    t.log({"reward": 0.5}, 7)
    t.close()
    assert library.named(log) == [(({"reward": 0.5},), {"step": 7})]


def test_resumed_wandb_run_keeps_its_id_and_a_new_run_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", library)
    for resume in (False, True, False):
        tracker(tmp_path, "wandb", resume=resume)
    first, second, third = (kwargs["id"] for _, kwargs in library.named("init"))
    assert first == second != third


def test_sink_table_names_real_classes() -> None:
    assert set(SINKS) == {"jsonl", "tensorboard", "wandb", "mlflow", "trackio"}
