"""Box arithmetic against sets of points."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from verl.weights.boxes import extents, intersect, numel, pieces, slices, subtract, whole, within

interval = st.tuples(st.integers(0, 5), st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))
pairs = st.integers(0, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[interval] * n)] * 2))


def points(box):
    return set(product(*(range(start, end) for start, end in box)))


@given(pairs)
def test_intersect_and_subtract_are_those_of_sets(pair):
    a, b = pair
    both, rest = intersect(a, b), subtract(a, b)
    assert (points(both) if both is not None else set()) == points(a) & points(b)
    assert set().union(*map(points, rest)) == points(a) - points(b)
    assert sum(map(numel, rest)) == len(points(a) - points(b)), "disjoint"
    assert len(rest) <= max(1, 2 * len(a))
    assert within(a, b) == (points(a) <= points(b))


@given(pairs, st.integers(1, 30))
def test_pieces_are_small_in_order_and_all_of_it(pair, most):
    box = pair[0]
    parts = list(pieces(box, most))
    assert [p for part in parts for p in sorted(points(part))] == sorted(points(box))
    assert all(1 <= numel(part) <= most for part in parts)


def test_shapes_and_indices():
    assert whole((2, 3)) == ((0, 2), (0, 3)) and whole(()) == () and numel(()) == 1
    assert extents(((1, 4), (0, 2))) == (3, 2)
    assert slices(((3, 4), (2, 5)), ((1, 9), (2, 5))) == (slice(2, 3), slice(0, 3))
