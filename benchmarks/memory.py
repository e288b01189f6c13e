"""Peak memory of a training step against its phases: one process holds one copy of the actor's weights.

Each case is a process of its own that builds the same trainer. `rollout` only samples, `update` only trains on
samples of the same shape that no engine made, `step` does whole steps. Nothing extra is held at the switch if the peak
of `step` is that of the larger phase.

    python benchmarks/memory.py                        # the quickstart's model and sizes
    python benchmarks/memory.py --algorithm grpo
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

CASES = ("rollout", "update", "step")
CONFIG = Path(__file__).parents[1] / "examples" / "ppo" / "quickstart.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="ppo")
    parser.add_argument("--steps", type=int, default=4, help="steps in each process")
    parser.add_argument("--runs", type=int, default=3, help="processes of each case, by turns")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.algorithm, args.steps)))
        return
    seen: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(args.runs):
        for case in CASES:
            seen[case].append(in_process(case, args))
    report(seen, args)


def in_process(case: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", case, "--algorithm", args.algorithm, "--steps", str(args.steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(case: str, algorithm: str, steps: int) -> dict[str, float]:
    """Peak GB of one case, and the size of the actor's weights."""
    import tempfile

    from verl.algos.presets import preset_values
    from verl.config import read_yaml, resolve
    from verl.config.loader import nest
    from verl.core.batch import Batch
    from verl.trainer.build import build
    from verl.trainer.reward import reward_column
    from verl.utils.console import RunConsole
    from verl.utils.monitoring import peak_memory

    with tempfile.TemporaryDirectory() as folder:
        layers = [read_yaml(CONFIG), nest("algorithm.name", algorithm), nest("trainer.output_dir", folder)]
        layers += [nest("trainer.sinks", []), nest("trainer.log_every", 10_000)]
        trainer = build(resolve(layers, preset_values()), RunConsole(stream=sys.stderr)).trainer
        trainer.hooks = ()
        for step in range(1, steps + 1):
            if case == "step":
                trainer.train_step()
                continue
            made = trainer.source.take(step) if case == "rollout" else invented(trainer, step)
            rewards = trainer.reward.score(made)
            if case == "update":
                trainer.step = step
                batch = trainer.score(Batch.of(made).with_(reward=reward_column(rewards)))
                trainer.update(trainer.algorithm.credit(batch)[0])
        weights = sum(p.numel() * p.element_size() for p in trainer.roles.actor.worker.policy.parameters())
        return {"peak": peak_memory(), "weights": weights / 1e9}


def invented(trainer, step: int) -> list:  # type: ignore[no-untyped-def]
    """Trajectories shaped like the source's, their longest, with tokens that nobody sampled."""
    from verl.core import Completion, Trajectory

    source = trainer.source
    out = []
    for group, index in enumerate(source.sampler.indices(*source.place(step))):
        prompt = source.prompts[index]
        for k in range(source.n):
            ids = tuple((7 * k + t + step) % 997 + 10 for t in range(source.params.max_tokens))
            answer = Completion("", ids, (-1.0,) * len(ids), "length", (0,) * len(ids))
            out.append(Trajectory.of(prompt, answer, str(k), group, k))
    return out


def report(seen: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    import torch
    import transformers

    import verl

    print(
        f"machine   {platform.machine()}, {platform.system()} {platform.release()}, {torch.get_num_threads()} threads"
    )
    print(f"versions  verl {verl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"command   python benchmarks/memory.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"{'case':10}{'min':>8}{'median':>9}{'max':>8}   peak resident GB of a process, {args.runs} runs")
    middle = {}
    for case, rows in seen.items():
        peaks = sorted(row["peak"] for row in rows)
        middle[case] = median(peaks)
        print(f"{case:10}{peaks[0]:8.2f}{middle[case]:9.2f}{peaks[-1]:8.2f}")
    larger = max(middle["rollout"], middle["update"])
    weights = seen["step"][0]["weights"]
    print(f"a whole step over the larger phase: {100 * (middle['step'] / larger - 1):+.1f} %")
    print(f"a second copy of the actor's weights ({weights:.2f} GB) would be {100 * weights / larger:+.1f} %")


if __name__ == "__main__":
    main()
