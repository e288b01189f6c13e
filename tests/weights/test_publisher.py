"""A publisher of one rank: what it is given, in which order, and names that do not fit."""

import pytest
import torch

from tests.weights.processes import Engine
from verl.core.errors import WeightsError
from verl.weights.publisher import RankPublisher


class Carrier:
    def names(self):
        return {"a", "b"}

    def stream(self, have):
        yield "b", have["b"]
        yield "a", have["a"][:1]


def test_the_engine_receives_its_shards_and_then_the_version():
    engine = Engine(["a", "b"])
    RankPublisher(engine, lambda: {"a": torch.arange(3), "b": torch.ones(2)}, Carrier()).publish(5)
    assert engine.version == 5
    assert {name: tensor.tolist() for name, tensor in engine.got.items()} == {"b": [1, 1], "a": [0]}


@pytest.mark.parametrize(("names", "said"), [(["a", "c", "b"], "wants 3 weights.*only: c"), ([], "wants 0.*a, b")])
def test_an_engine_that_wants_other_names_is_told_before_anything_moves(names, said):
    engine = Engine(names)
    with pytest.raises(WeightsError, match=said):
        RankPublisher(engine, dict, Carrier()).publish(1)
    assert engine.version == 0 and not engine.got
