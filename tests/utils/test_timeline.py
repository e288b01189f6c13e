"""Timelines of calls that were written by hand."""

import random

import pytest

from verl.core.span import Span
from verl.utils.timeline import at_once, busy, seconds, timeline

SPANS = [
    Span("actor", 0, "advance", 100.0, 104.0),
    Span("actor", 1, "advance", 100.0, 103.0),
    Span("critic", 0, "values", 104.0, 106.0),
    Span("actor", 0, "old_logprobs", 105.0, 107.0),
    Span("ref", 0, "ref_logprobs", 105.5, 106.5),
    Span("actor", 0, "abort", 109.0, 110.0),
]


def test_seconds_at_once_are_counted_once() -> None:
    """Two ranks of one role are one role; three roles at once are no more than two."""
    assert busy(SPANS[:2]) == [(100.0, 104.0)]
    assert seconds(busy(s for s in SPANS if s.role == "actor")) == 7.0
    assert at_once(SPANS) == pytest.approx(1.5)  # 105 to 106.5
    assert at_once(SPANS[:2]) == 0.0 == at_once([])


def test_at_once_against_counting() -> None:
    """Intervals with whole borders against a count of every second."""
    draw = random.Random(1)
    for _ in range(50):
        spans = []
        for _ in range(draw.randrange(12)):
            start = draw.randrange(30)
            spans.append(Span(draw.choice("abc"), 0, "m", start, start + draw.randrange(6)))
        want = sum(len({s.role for s in spans if s.start <= t < s.end}) > 1 for t in range(40))
        assert at_once(spans) == want


def test_rows() -> None:
    rows = timeline(SPANS, width=20)
    assert rows[0].split() == ["0", "s", "10.00", "s"]
    assert rows[1] == "actor   dddddddd..oooo....aa 7.00 s"
    assert rows[2] == "critic  ........vvvv........ 2.00 s"
    assert rows[3] == "ref     ...........rr....... 1.00 s"
    assert "a abort, d advance, o old_logprobs, r ref_logprobs, v values" in rows[4]
    assert rows[5].strip() == "two roles or more at once: 1.50 s"
    assert timeline([]) == ["no call was made"]


def test_a_column_shows_what_took_most_of_it() -> None:
    spans = [Span("a", 0, "long", 0.0, 0.7), Span("a", 0, "short", 0.7, 1.0), Span("a", 0, "end", 9.0, 10.0)]
    assert timeline(spans, width=10)[1].split()[1] == "l........e"
