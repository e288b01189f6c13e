"""What each role did when, as text, and for how long several of them worked at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_letters

from verl.core.span import Span

Interval = tuple[float, float]
IDLE = "."


def busy(spans: Iterable[Span]) -> list[Interval]:
    """When any of these went on: intervals that do not touch, ascending."""
    out: list[Interval] = []
    for start, end in sorted((s.start, s.end) for s in spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def at_once(spans: Sequence[Span]) -> float:
    """Seconds in which two roles or more worked, on whatever ranks. (Ranks of one pool that leave a call one before the
    other are in two roles for a moment, too.)
    """
    edges = [edge for mine in _by_role(spans).values() for edge in _edges(busy(mine))]
    total, working, last = 0.0, 0, 0.0
    for when, change in sorted(edges):
        if working > 1:
            total += when - last
        working, last = working + change, when
    return total


def timeline(spans: Sequence[Span], width: int = 72) -> list[str]:
    """A row a role, in order of first work: a letter for the method that took most of a column, a point where none
    did; its busy seconds behind. Below, what the letters mean and the seconds at once.
    """
    if not spans:
        return ["no call was made"]
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    letters = _letters(sorted({s.method for s in spans}))
    roles = _by_role(sorted(spans, key=lambda s: s.start))
    margin = max(map(len, roles)) + 2
    column = max(end - start, 1e-9) / width
    rows = [f"{'':<{margin}}{'0 s':<{width - 9}}{end - start:>7.2f} s"]
    for role, mine in roles.items():
        bar = "".join(_cell(mine, start + i * column, column, letters) for i in range(width))
        rows.append(f"{role:<{margin}}{bar} {seconds(busy(mine)):.2f} s")
    rows.append(f"{'':<{margin}}" + ", ".join(f"{letter} {method}" for method, letter in letters.items()))
    rows.append(f"{'':<{margin}}two roles or more at once: {at_once(spans):.2f} s")
    return rows


def _by_role(spans: Iterable[Span]) -> dict[str, list[Span]]:
    out: dict[str, list[Span]] = {}
    for span in spans:
        out.setdefault(span.role, []).append(span)
    return out


def _edges(intervals: Iterable[Interval]) -> list[tuple[float, int]]:
    return [edge for start, end in intervals for edge in ((start, 1), (end, -1))]


def _cell(spans: Sequence[Span], start: float, length: float, letters: dict[str, str]) -> str:
    covered: dict[str, float] = {}
    for s in spans:
        if (shared := min(s.end, start + length) - max(s.start, start)) > 0:
            covered[s.method] = covered.get(s.method, 0.0) + shared
    return letters[max(covered, key=lambda method: covered[method])] if covered else IDLE


def _letters(methods: Iterable[str]) -> dict[str, str]:
    """One a method: the first of its own that is free, else any."""
    out: dict[str, str] = {}
    for method in methods:
        own = [c for c in method + method.upper() + ascii_letters if c.isalpha() and c not in out.values()]
        out[method] = own[0] if own else "?"
    return out
