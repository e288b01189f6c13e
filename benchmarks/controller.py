"""What control costs: seconds of a step outside of workers, and bytes through the controller, by number of ranks.

    python benchmarks/controller.py                          # 1, 2, 4 and 8 ranks, 64 sequences of 512 tokens a rank
    python benchmarks/controller.py --ranks 1,2 --sequences 256 --runs 9

As it is: about 2 minutes on 2 cores.

A step of PPO with critic and reference on one pool of processes on Ray: generation through the engine of the group,
packing, scoring, credit, update, publishing: the loop's own code. Its workers take and return the columns and answers
of the real ones and compute nothing, so all of a step is control. `outside`: its seconds less those within the methods
of workers. `growing`: --sequences a rank; `fixed`: as many in all as the most ranks have together. Not in it: the
tokenizer and rewards. Where there are more ranks than cores, ranks wait for each other to read what they were sent.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cases.arguments import at_least, counts, parser
from common import Spread, header
from verl.cli.arguments import run_main

if TYPE_CHECKING:
    from cases.control import Stepped

Seen = Mapping[tuple[str, int, int], Sequence["Stepped"]]
"""By case, ranks and sequences."""


def main() -> int:
    args = _arguments()
    import ray

    seen = measure(args)
    print(header({"ray": ray.__version__}), *report(seen, args.tokens), sep="\n")
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=counts, default=[1, 2, 4, 8], help="numbers of processes")
    flags.add_argument("--sequences", type=at_least(8), default=64, help="of each rank, where data grows")
    flags.add_argument("--tokens", type=at_least(8), default=512, help="of each sequence; a quarter is its prompt")
    flags.add_argument("--runs", type=at_least(1), default=7, help="steps that count, of each case; one more warms up")
    args = flags.parse_strictly(sys.argv[1:])
    if args.sequences % 8:
        flags.error(f"--sequences: {args.sequences} is no multiple of the 8 samples of a prompt")
    return args


def measure(args: argparse.Namespace) -> Seen:
    """Steps of both cases on each number of ranks; a case with as much data as the other is measured once."""
    from cases.control import ROLES, Control
    from verl.controller.executors.ray import Cluster, ResourcePool

    seen: dict[tuple[str, int, int], list[Stepped]] = {}
    most = max(args.ranks) * args.sequences
    with Cluster(cpus=sum(args.ranks), deadline=300) as cluster:
        for ranks in args.ranks:
            pool = ResourcePool(cluster, ranks, threads=1)
            control = Control(dict.fromkeys(ROLES, pool))
            for case, sequences in (("growing", ranks * args.sequences), ("fixed", most)):
                if case == "fixed" and sequences == ranks * args.sequences:
                    seen[case, ranks, sequences] = seen["growing", ranks, sequences]
                    continue
                steps = [control.step(sequences, args.tokens) for _ in range(args.runs + 1)]
                seen[case, ranks, sequences] = steps[1:]
                print(f"{ranks} ranks, {sequences} sequences: done", file=sys.stderr, flush=True)
    return seen


def report(seen: Seen, tokens: int) -> list[str]:
    """The table, and how fast seconds and bytes grow with data."""
    rows = [
        f"{'data':<8}{'ranks':>6}{'tokens':>9}" + f"{'outside s: min, median, max':>30}{'step s':>9}"
        f"{'MB sent':>9}{'received':>9}{'B/token':>9}   median s by phase"
    ]
    for (case, ranks, sequences), steps in seen.items():
        count = sequences * tokens
        sent, received = (Spread.of([getattr(s, way) / 1e6 for s in steps]).middle for way in ("sent", "received"))
        cells = Spread.of([s.outside for s in steps]).cells(10) + f"{Spread.of([s.seconds for s in steps]).middle:9.3f}"
        cells += f"{sent:9.2f}{received:9.2f}{(sent + received) * 1e6 / count:9.1f}"
        phases = {name: Spread.of([s.phases[name] for s in steps]).middle for name in steps[0].phases}
        told = ", ".join(f"{name} {value:.3f}" for name, value in phases.items())
        rows.append(f"{case:<8}{ranks:>6}{count:>9}{cells}   {told}")
    return rows + _growth(seen)


def _growth(seen: Seen) -> list[str]:
    """Exponents: 1 is as fast as data, or as ranks, where data is fixed."""
    rows = []
    for case, what in (("growing", "data (and ranks)"), ("fixed", "ranks")):
        mine = {ranks: steps for (name, ranks, _), steps in seen.items() if name == case}
        if len(mine) < 2:
            continue
        seconds = {ranks: Spread.of([s.outside for s in steps]).middle for ranks, steps in mine.items()}
        volume = {ranks: Spread.of([s.sent + s.received for s in steps]).middle for ranks, steps in mine.items()}
        rows.append(
            f"{case}: outside seconds grow as {what} to the power {exponent(seconds):.2f}, "
            f"bytes to the power {exponent(volume):.2f}"
        )
    return rows


def exponent(values: Mapping[int, float]) -> float:
    """Slope of log(value) over log(size), by least squares."""
    x, y = [math.log(size) for size in values], [math.log(value) for value in values.values()]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


if __name__ == "__main__":
    sys.exit(run_main(main))
