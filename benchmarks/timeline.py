"""What each role does when, in one step: all roles on one pool of processes, and the critic on a pool of its own.

    python benchmarks/timeline.py                                        # 2 processes: 2 shared, and 1 + 1
    python benchmarks/timeline.py --processes 4 --width 100
    python benchmarks/timeline.py --method advance=3 --method update_critic=0.5

As it is: about half a minute on 2 cores.

PPO with critic and reference on Ray. Workers sleep for the seconds that --method says of one process (each of several
takes its share), so that a timeline shows what may run at once and not how many cores there are. In `split` half of the
processes hold actor and reference, the other half the critic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cases.arguments import at_least, parser
from common import header
from verl.cli.arguments import run_main

SECONDS = {
    "advance": 1.2,
    "old_logprobs": 0.3,
    "ref_logprobs": 0.3,
    "values": 0.5,
    "update_actor": 1.0,
    "update_critic": 1.0,
    "publish": 0.1,
}
"""Of one process, in the proportions of a step of the quickstart's model."""


def main() -> int:
    args = _arguments()
    import ray

    print(header({"ray": ray.__version__}))
    for line in show(args):
        print(line, flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--processes", type=at_least(2), default=2, help="in all; even")
    flags.add_argument("--sequences", type=at_least(8), default=64, help="of a step; whole prompts of 8 samples")
    flags.add_argument("--tokens", type=at_least(8), default=128, help="of each sequence")
    flags.add_argument("--width", type=at_least(20), default=72, help="columns of a timeline")
    flags.add_argument(
        "--method", type=_method, action="append", default=[], metavar="NAME=SECONDS", help="how long a method takes"
    )
    args = flags.parse_strictly(sys.argv[1:])
    if args.processes % 2:
        flags.error(f"--processes: {args.processes} cannot be halved")
    return args


def _method(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in SECONDS:
        raise argparse.ArgumentTypeError(f"no method {name!r}; there are {', '.join(SECONDS)}")
    try:
        taken = float(value)
    except ValueError:
        taken = -1.0
    if not 0 <= taken < 60:
        raise argparse.ArgumentTypeError(f"{value!r} is no number of seconds from 0 to 60")
    return name, taken


def show(args: argparse.Namespace) -> Sequence[str]:
    """Both timelines, of the second step of each."""
    from cases.control import Control
    from verl.controller.executors.ray import Cluster, ResourcePool
    from verl.utils.timeline import timeline

    taken, lines = SECONDS | dict(args.method), []
    with Cluster(cpus=2 * args.processes, deadline=300) as cluster:

        def pool(ranks: int) -> ResourcePool:
            return ResourcePool(cluster, ranks, threads=1)

        shared, policy, critic = pool(args.processes), pool(args.processes // 2), pool(args.processes // 2)
        cases = {
            f"colocated: actor, ref and critic on {shared.world} processes": {
                "actor": shared,
                "ref": shared,
                "critic": shared,
            },
            f"split: actor and ref on {policy.world}, critic on {critic.world}": {
                "actor": policy,
                "ref": policy,
                "critic": critic,
            },
        }
        for name, where in cases.items():
            control = Control(where, taken)
            control.step(args.sequences, args.tokens)
            cluster.timeline.clear()
            step = control.step(args.sequences, args.tokens)
            lines += ["", f"{name}; a step {step.seconds:.2f} s", *timeline(list(cluster.timeline), args.width)]
    return lines


if __name__ == "__main__":
    sys.exit(run_main(main))
