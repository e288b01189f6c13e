"""Random pairs of layouts for the tests of resharding."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from verl.core.errors import WeightsError
from verl.parallel.layout import Coord, Layout
from verl.weights.groups import generation_coords
from verl.weights.plan import Shard
from verl.weights.shards import Parameter, shards


@dataclass(frozen=True)
class Case:
    """One pair of layouts over the same ranks."""

    parameters: tuple[Parameter, ...]
    train: Layout
    generation: Layout
    coords: tuple[Coord, ...]

    @property
    def src(self) -> list[Shard]:
        return shards(self.parameters, self.train)

    @property
    def dst(self) -> list[Shard]:
        return shards(self.parameters, self.generation, self.coords)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any sizes, cuts and axes of up to 12 ranks; strided groups where there are any."""
    world = draw(st.integers(1, 12))
    train = _layout(draw, world, fsdp=True)
    generation = _layout(draw, world, fsdp=False)
    layers = draw(st.integers(max(train.pp, generation.pp), 4 + max(train.pp, generation.pp)))
    parameters = [_parameter(draw, i, (i,)) for i in range(layers)]
    parameters += [_parameter(draw, layers, ()), _parameter(draw, layers + 1, (0, layers - 1))]
    groups = draw(st.sampled_from(["strided", "consecutive"]))
    try:
        coords = generation_coords(train, generation, groups)
    except WeightsError:
        coords = generation_coords(train, generation, "consecutive")
    return Case(tuple(parameters), train, generation, coords)


def _layout(draw: st.DrawFn, world: int, fsdp: bool) -> Layout:
    tp = draw(st.sampled_from(_divisors(world)))
    pp = draw(st.sampled_from(_divisors(world // tp)))
    dp = world // tp // pp
    return Layout(dp, pp, tp, draw(st.sampled_from(_divisors(dp))) if fsdp else 1)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _parameter(draw: st.DrawFn, number: int, layers: tuple[int, ...]) -> Parameter:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    cut = draw(st.sampled_from([None, *range(len(shape))]))
    return Parameter(f"w{number}", shape, cut, layers)
