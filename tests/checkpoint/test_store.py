"""Checkpoints are complete or absent: kills, damage and full disks leave the last good one."""

import json
import os

import pytest
import torch
from safetensors import SafetensorError

from verl.checkpoint import CheckpointStore
from verl.core import CheckpointError

STATE = {
    "actor": {"optimizer": {"master": {"a.b": torch.arange(6.0).view(2, 3)}, "steps": 3}, "empty": {}},
    "trainer": {"step": 3, "coef": 0.1},
}


def store(tmp_path, **kw) -> tuple[CheckpointStore, list[str]]:
    said: list[str] = []
    return CheckpointStore(tmp_path / "c", warn=said.append, **kw), said


def test_round_trip_and_keep(tmp_path) -> None:
    s, _ = store(tmp_path, keep=2)
    for step in (1, 2, 10):
        s.save(step, STATE, {"data": "x"})
    assert s.steps() == [2, 10]
    step, manifest = s.newest()
    assert step == 10 and manifest["data"] == "x"
    back = s.load(10)
    assert torch.equal(back["actor"]["optimizer"]["master"]["a.b"], STATE["actor"]["optimizer"]["master"]["a.b"])
    assert (
        back["actor"]["optimizer"]["steps"] == 3
        and back["actor"]["empty"] == {}
        and back["trainer"] == STATE["trainer"]
    )


@pytest.mark.parametrize("fault", ["flip", "truncate", "missing", "manifest"])
def test_damage_is_found_and_the_last_good_one_used(tmp_path, fault: str) -> None:
    s, said = store(tmp_path)
    s.save(1, STATE, {})
    s.save(2, STATE, {})
    path = s.folder(2) / ("manifest.json" if fault == "manifest" else "actor.safetensors")
    raw = bytearray(path.read_bytes())
    if fault == "flip":
        raw[-1] ^= 1
        path.write_bytes(raw)
    elif fault == "missing":
        path.unlink()
    else:
        path.write_bytes(raw[: len(raw) // 2])
    assert s.newest()[0] == 1
    assert len(said) == 1 and "step-000002" in said[0]


def test_a_kill_while_writing_leaves_no_checkpoint(tmp_path, monkeypatch) -> None:
    s, _ = store(tmp_path)
    s.save(1, STATE, {})

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr("verl.checkpoint.manifest.fsync_tree", die)
    with pytest.raises(Killed):
        s.save(2, STATE, {})
    monkeypatch.undo()
    assert s.newest()[0] == 1
    s.save(2, STATE, {})
    assert s.newest()[0] == 2 and not list(s.root.glob(".writing*"))


def test_full_disk_is_one_clear_error(tmp_path, monkeypatch) -> None:
    s, _ = store(tmp_path)
    s.save(1, STATE, {})

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("verl.checkpoint.store.save_file", full)
    with pytest.raises(CheckpointError, match="No space left.*earlier ones are untouched"):
        s.save(2, STATE, {})
    assert s.newest()[0] == 1


def test_manifest_lists_every_file(tmp_path) -> None:
    s, _ = store(tmp_path)
    folder = s.save(1, STATE, {})
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {p.name for p in folder.iterdir()} - {"manifest.json"}


@pytest.mark.parametrize("text", ["[]", "5", '{"files": []}', '{"files": {"a": 1}}', '{"files": {"a": {}}}'])
def test_a_manifest_that_is_json_but_none(tmp_path, text) -> None:
    s, said = store(tmp_path)
    s.save(1, STATE, {})
    (s.folder(1) / "manifest.json").write_text(text)
    assert s.newest() is None and len(said) == 1


def test_a_full_disk_met_by_the_tensor_file(tmp_path, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    s, _ = store(tmp_path)
    s.save(1, STATE, {})
    monkeypatch.setattr("verl.checkpoint.store.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        s.save(2, STATE, {})
    assert s.steps() == [1] and not list(s.root.glob(".writing-*"))
