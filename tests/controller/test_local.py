"""The embedded executor holds a worker to what it declared."""

import pytest
import torch

from verl.controller.dispatch import ALL_TO_ALL, DP, ONE_TO_ALL, RANK_ZERO
from verl.controller.executors.local import LocalGroup
from verl.controller.group import gather
from verl.controller.worker import Worker, register
from verl.core.batch import Batch, cumulative
from verl.parallel.layout import Coord, Layout


class Doubler(Worker):
    @register(DP, reads=("values",), writes=("returns",), optional=("advantages",))
    def double(self, batch: Batch) -> Batch:
        self.seen = set(batch.cols)
        return Batch(batch.cu_seqlens, {"returns": batch["values"] * 2})

    @register(DP, reads=("values",), writes=("returns",))
    def forgets(self, batch: Batch) -> Batch:
        return batch

    @register(ONE_TO_ALL)
    def hello(self, name: str) -> str:
        return f"hello {name}"

    @register(RANK_ZERO)
    def lead(self) -> str:
        return "lead"

    @register(ALL_TO_ALL)
    def own(self, value: int) -> int:
        return value

    def hidden(self) -> None: ...


def batch() -> Batch:
    return Batch(cumulative(torch.tensor([2, 1])), {"values": torch.ones(3), "token_ids": torch.arange(3)})


def test_a_method_sees_only_what_it_reads() -> None:
    group = LocalGroup(Doubler())
    (out,) = gather(group.call("double", batch()))
    assert group.worker.seen == {"values"} and out["returns"].tolist() == [2, 2, 2] and set(out.cols) == {"returns"}
    group.call("double", batch().with_(advantages=torch.zeros(3)))
    assert group.worker.seen == {"values", "advantages"}
    assert group.call("hello", name="you").result() == ["hello you"] and group.call("lead").result() == "lead"
    assert group.call("own", value=[3]).result() == [3]


def test_broken_promises_are_errors() -> None:
    group = LocalGroup(Doubler())
    with pytest.raises(AssertionError, match="declares writes"):
        group.call("forgets", batch())
    with pytest.raises(AttributeError, match="not marked with @register"):
        group.call("hidden")
    with pytest.raises(KeyError, match="no column 'values'"):
        group.call("double", batch().select(("token_ids",)))


def test_layout() -> None:
    layout = Layout(dp=2, pp=3, tp=2)
    coords = [layout.coord(r) for r in range(layout.world)]
    assert len(set(coords)) == 12 and coords[0] == Coord(0, 0, 0) and coords[-1] == Coord(1, 2, 1)
