"""Checkpoints are complete or absent: kills, damage and full disks leave the last good one."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.checkpoint.simulated import everything
from verl.checkpoint import CheckpointStore, sharded
from verl.checkpoint.sharded import Piece
from verl.core import CheckpointError
from verl.core.errors import WorkerError
from verl.weights.boxes import whole

STATE = {"trainer": {"step": 3, "coef": 0.1}, "source": {"retired": [2, 7], "empty": {}}}
WEIGHT = torch.arange(6.0).view(2, 3)


def write(folder: Path) -> None:
    sharded.save(folder, {"a.b": Piece(WEIGHT, whole((2, 3)), (2, 3))})


MODELS = {"actor": write, "critic": write}


def store(tmp_path, **kw) -> tuple[CheckpointStore, list[str]]:
    said: list[str] = []
    return CheckpointStore(tmp_path / "c", warn=said.append, **kw), said


def test_round_trip_and_keep(tmp_path) -> None:
    s, _ = store(tmp_path, keep=2)
    for step in (1, 2, 10):
        s.save(step, STATE, {"data": "x"}, MODELS)
    assert s.steps() == [2, 10]
    step, manifest = s.newest()
    assert step == 10 and manifest["data"] == "x"
    assert s.load(10) == STATE
    for name in MODELS:
        assert torch.equal(everything(s.part(10, name))["a.b"], WEIGHT)


@pytest.mark.parametrize("fault", ["flip", "truncate", "missing", "manifest"])
def test_damage_is_found_and_the_last_good_one_used(tmp_path, fault: str) -> None:
    s, said = store(tmp_path)
    s.save(1, STATE, {}, MODELS)
    s.save(2, STATE, {}, MODELS)
    path = s.folder(2) / ("manifest.json" if fault == "manifest" else "actor/rank-00000.safetensors")
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
    s.save(1, STATE, {}, MODELS)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr("verl.checkpoint.manifest.fsync_tree", die)
    with pytest.raises(Killed):
        s.save(2, STATE, {}, MODELS)
    monkeypatch.undo()
    assert s.newest()[0] == 1
    s.save(2, STATE, {}, MODELS)
    assert s.newest()[0] == 2 and not list(s.root.glob(".writing*"))


@pytest.mark.parametrize("where", ["sharded.os.fsync", "sharded.save_file", "store.json.dumps", "manifest.write"])
def test_full_disk_is_one_clear_error(tmp_path, monkeypatch, where: str) -> None:
    s, _ = store(tmp_path)
    s.save(1, STATE, {}, MODELS)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(f"verl.checkpoint.{where}", full)
    with pytest.raises(CheckpointError, match="No space left.*earlier ones are untouched"):
        s.save(2, STATE, {}, MODELS)
    assert s.newest()[0] == 1


def test_manifest_lists_every_file(tmp_path) -> None:
    s, _ = store(tmp_path)
    folder = s.save(1, STATE, {}, MODELS)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {"trainer.json", "source.json", *(f"{m}/rank-00000.safetensors" for m in MODELS)}
    assert all((folder / name).is_file() for name in files)


@pytest.mark.parametrize("text", ["[]", "5", '{"files": []}', '{"files": {"a": 1}}', '{"files": {"a": {}}}'])
def test_a_manifest_that_is_json_but_none(tmp_path, text) -> None:
    s, said = store(tmp_path)
    s.save(1, STATE, {}, MODELS)
    (s.folder(1) / "manifest.json").write_text(text)
    assert s.newest() is None and len(said) == 1


def test_a_full_disk_met_by_the_tensor_file(tmp_path, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    s, _ = store(tmp_path)
    s.save(1, STATE, {}, MODELS)
    monkeypatch.setattr("verl.checkpoint.sharded.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        s.save(2, STATE, {}, MODELS)
    assert s.steps() == [1] and not list(s.root.glob(".writing-*"))


@pytest.mark.parametrize("killed", [False, True])
def test_a_worker_fails_while_it_writes(tmp_path, killed: bool) -> None:
    """A full disk on another machine, or a controller that ends there: the earlier checkpoint is whole."""

    class Killed(BaseException):
        pass

    def fail(folder: Path) -> None:
        write(folder)
        raise Killed if killed else WorkerError("No space left", role="critic", rank=1, method="save")

    s, _ = store(tmp_path)
    s.save(1, STATE, {}, MODELS)
    with pytest.raises(Killed if killed else CheckpointError, match=None if killed else "critic, rank 1, save: No"):
        s.save(2, STATE, {}, {**MODELS, "critic": fail})
    assert s.steps() == [1] and s.newest()[0] == 1
    s.save(2, STATE, {}, MODELS)
    assert s.newest()[0] == 2 and not list(s.root.glob(".writing*"))


def test_a_checkpoint_of_another_version_is_refused(tmp_path) -> None:
    s, _ = store(tmp_path)
    folder = s.save(1, STATE, {})
    made = json.loads((folder / "manifest.json").read_text())
    del made["format"]
    (folder / "manifest.json").write_text(json.dumps(made))
    assert s.newest()[0] == 1
    with pytest.raises(CheckpointError, match=r"step-000001: another version .* \(format 1, .* without --resume"):
        s.load(1)
