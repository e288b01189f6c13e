"""Layouts and the errors that name the configuration."""

import pytest
import torch

from verl.core.errors import ConfigError
from verl.parallel.layout import Coord, Layout
from verl.parallel.mesh import SINGLE, Mesh


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="fsdp: 3 does not divide dp 4"):
        Layout(dp=4, fsdp=3)
    with pytest.raises(ConfigError, match="tp: 0 ranks"):
        Layout(tp=0)


def test_fsdp_cuts_the_data_axis_and_adds_no_rank() -> None:
    layout = Layout(dp=4, tp=2, fsdp=2)
    assert layout.world == 8 and layout.coord(5) == Coord(dp=2, pp=0, tp=1)


def test_a_world_of_another_size_is_named_with_its_section() -> None:
    with pytest.raises(ConfigError, match=r"actor.parallel: dp 2 x pp 1 x tp 2 is 4 ranks, but 1 process runs; .*dp"):
        Mesh.of(Layout(dp=2, tp=2), path="actor.parallel")
    assert Mesh.of(Layout()) == SINGLE and SINGLE.coord == Coord(0, 0, 0)


def test_a_world_of_one_sums_and_counts_itself() -> None:
    values = torch.ones(2)
    assert SINGLE.sum(values, "shard", "tp") is values and SINGLE.most(3) == 3
    assert SINGLE.first and not SINGLE.sharded
