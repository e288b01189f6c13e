"""Layouts and the errors that name the configuration."""

import math

import pytest
import torch

from verl.core.errors import ConfigError
from verl.parallel.layout import Coord, Layout
from verl.parallel.mesh import SINGLE, Mesh
from verl.parallel.norm import global_norm


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


class Twins(Mesh):
    """This rank's view of two tensor ranks whose numbers happen to be equal."""

    def sum(self, values: torch.Tensor, *dims: str) -> torch.Tensor:
        return values * 2 if "tp" in dims else values


def test_the_norm_counts_what_is_owned_once() -> None:
    grads = [torch.full((3,), 2.0), torch.full((2, 2), 1.0), torch.empty(0)]
    mesh = Twins(layout=Layout(tp=2))
    assert global_norm(grads, [grads[1]], mesh) == pytest.approx((2 * 4) ** 0.5)
    assert global_norm(grads, [grads[0][:1], grads[1][:, :1]], SINGLE) == pytest.approx((4 + 2) ** 0.5)
    assert global_norm([], [], SINGLE) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_others_count_must_be_finite_here(bad: float) -> None:
    grads = [torch.tensor([1.0, bad])]
    assert not math.isfinite(global_norm(grads, [grads[0][:1]], SINGLE))
