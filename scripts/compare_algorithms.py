"""Train one task with several presets and seeds, at an equal budget of sampled responses, and write what was seen.

    python scripts/compare_algorithms.py --jobs 2        # trains what is missing in outputs/compare, prints the table
    python scripts/compare_algorithms.py --only-report   # prints the table and draws the plot again

Every run is `examples/ppo/quickstart.py --algorithm NAME --seed N` with its defaults, but a constant learning rate, so
that a curve means the same wherever it is cut. dapo samples more responses a step, so its budget ends in fewer steps.
Needs matplotlib (reasoning-gym brings it).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from verl.algos.presets import PRESETS
from verl.utils.tracking.jsonl import read_metrics

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo")
COLOURS = ("#24292f", "#0969da", "#54aeff", "#1a7f37", "#d1570a", "#8250df", "#bf3989", "#9a6700")
MARKS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the budget that the table shows."""
UPDATES = 40
"""The table also compares after this many optimizer steps, whatever they cost."""


@dataclass(frozen=True)
class Curve:
    """One run, an entry an evaluation: updates made, responses sampled, accuracy."""

    updates: list[int]
    responses: list[float]
    accuracy: list[float]

    @classmethod
    def of(cls, run: Path) -> Curve:
        updates, responses, accuracy, steps, seen = [], [], [], 0, 0.0
        for row in read_metrics(run / "metrics.jsonl"):
            if "rollout/responses" in row:
                seen += row["rollout/responses"]
                steps += 1
            if "eval/accuracy" in row:
                updates.append(steps)
                responses.append(seen)
                accuracy.append(row["eval/accuracy"])
        return cls(updates, responses, accuracy)

    def at(self, responses: float) -> float:
        """Accuracy of the last evaluation within `responses`."""
        return [a for r, a in zip(self.responses, self.accuracy, strict=True) if r <= responses][-1]

    def after(self, updates: int) -> float:
        """Accuracy of the last evaluation within `updates`."""
        return [a for u, a in zip(self.updates, self.accuracy, strict=True) if u <= updates][-1]


def folder(out: Path, algorithm: str, seed: int) -> Path:
    return out / f"{algorithm}-{seed}"


FEWER = {"dapo": 2 / 3}
"""Share of the steps that is enough to spend the budget."""


def train(out: Path, algorithm: str, seed: int, steps: int, threads: int) -> None:
    """One run, unless it is there already."""
    run = folder(out, algorithm, seed)
    if (run / "config.json").is_file():
        return
    command = [sys.executable, str(ROOT / "examples" / "ppo" / "quickstart.py"), "--algorithm", algorithm]
    command += ["--seed", str(seed), "--max_steps_per_episode", str(steps), "--eval_every", "5", "--overwrite"]
    command += ["--output_dir", str(run), "--set", "actor.optim.schedule=constant"]
    log = out / f"{algorithm}-{seed}.log"
    with log.open("w") as f:
        code = subprocess.run(
            command, stdout=f, stderr=f, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
        ).returncode
    print(f"{algorithm} seed {seed}: {'done' if code == 0 else f'failed, see {log}'}", flush=True)


def table(curves: dict[str, list[Curve]], budget: int) -> list[str]:
    marks = [round(budget * m) for m in MARKS]
    head = "| preset | " + " | ".join(f"{m:,} responses" for m in marks) + f" | {UPDATES} updates |"
    out = [head, "|---" * (len(marks) + 2) + "|"]
    for name, runs in curves.items():
        cells = [_spread([c.at(mark) for c in runs]) for mark in marks]
        cells.append(_spread([c.after(UPDATES) for c in runs]))
        out.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return out


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def draw(curves: dict[str, list[Curve]], budget: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(10, 4.6), dpi=120, sharex=True, sharey=True)
    for colour, panel, (name, runs) in zip(COLOURS, axes.flat, curves.items(), strict=False):
        for others in curves.values():
            for c in others:
                panel.plot(c.responses, c.accuracy, color="#d0d7de", linewidth=0.5)
        for c in runs:
            panel.plot(c.responses, c.accuracy, color=colour, linewidth=1.6)
        panel.set_title(name, fontsize=9, loc="left")
        panel.set(xlim=(0, budget), ylim=(0, 1.02))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    figure.supxlabel("sampled responses", fontsize=9)
    figure.supylabel("greedy accuracy", fontsize=9)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(PRESETS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="steps of 16 prompts with 8 samples each [60]")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "compare")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time; threads are shared out [1]")
    parser.add_argument("--only-report", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    share = {name: round(args.steps * FEWER.get(name, 1.0)) for name in args.algorithms}
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    if not args.only_report:
        with ThreadPoolExecutor(args.jobs) as pool:
            for seed in args.seeds:
                for name in args.algorithms:
                    pool.submit(train, args.out, name, seed, share[name], threads)
    budget = args.steps * 16 * 8
    runs = {n: [folder(args.out, n, s) for s in args.seeds] for n in args.algorithms}
    curves = {n: [Curve.of(r) for r in rs if (r / "config.json").is_file()] for n, rs in runs.items()}
    curves = {n: c for n, c in curves.items() if c}
    print("\n".join(table(curves, budget)))
    draw(curves, budget, ROOT / "docs" / "assets" / "algorithms-compared.svg")


if __name__ == "__main__":
    main()
