"""Does memory grow from step to step? A whole run with its log, evaluation and files, resident memory after every step.

    python benchmarks/growth.py                      # the quickstart, PPO with its critic, 30 steps
    python benchmarks/growth.py --algorithm grpo
    python benchmarks/growth.py --config FILE.yaml --set rollout.n=16

As it is: about 3 minutes on 2 cores. Exits with 1 where the last step holds more than --allowed over step --settled.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile

from cases.arguments import at_least, parser, share
from common import ROOT
from verl.cli.arguments import run_main

CONFIG = ROOT / "examples" / "ppo" / "quickstart.yaml"


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        seen = watch(args, folder)
    growth = seen[-1] / seen[args.settled - 1] - 1
    print("GB after each step  " + " ".join(f"{gb:.3f}" for gb in seen))
    print(json.dumps({"settled": seen[args.settled - 1], "last": seen[-1], "most": max(seen), "growth": growth}))
    return int(growth > args.allowed)


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--config", default=str(CONFIG), help="a YAML file")
    flags.add_argument("--algorithm", default="ppo", help="preset")
    flags.add_argument("--steps", type=at_least(2), default=30, help="of the run")
    flags.add_argument("--settled", type=at_least(1), default=5, help="the step that the last is compared with")
    flags.add_argument("--allowed", type=share, default=0.02, help="growth that is still good, as a share")
    flags.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="any value of the config")
    args = flags.parse_strictly(sys.argv[1:])
    if args.settled >= args.steps:
        flags.error(f"--settled: {args.settled} is not before the last of --steps {args.steps}")
    return args


def watch(args: argparse.Namespace, folder: str) -> list[float]:
    """Resident GB after every step of a run."""
    from verl.algos.presets import preset_values
    from verl.config import read_yaml, resolve
    from verl.config.loader import nest, parse_override
    from verl.trainer.build import build
    from verl.trainer.hooks import Hook
    from verl.trainer.loop import StepResult, Trainer
    from verl.utils.console import RunConsole
    from verl.utils.monitoring import resident_memory

    seen: list[float] = []

    class Watch(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            seen.append(resident_memory())

    layers = [read_yaml(args.config), nest("algorithm.name", args.algorithm), nest("trainer.output_dir", folder)]
    layers += [nest("trainer.num_episodes", args.steps), *(parse_override(text) for text in args.set)]
    built = build(resolve(layers, preset_values()), RunConsole(stream=sys.stderr))
    built.trainer.planned_steps = args.steps
    built.trainer.hooks = [*built.trainer.hooks, Watch()]
    built.trainer.fit()
    built.tracker.close()
    return seen


if __name__ == "__main__":
    sys.exit(run_main(main))
