"""Draw the learning curves of runs from their metrics.jsonl: accuracy against minutes of training.

    python scripts/learning_curve.py PPO=outputs/ppo-0,outputs/ppo-1 GRPO=outputs/grpo-0 --output docs/assets/curve.svg

Runs of one label (seeds) are drawn as thin lines with their mean on top. Needs matplotlib (reasoning-gym brings it).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from verl.utils.tracking.jsonl import read_metrics

COLOURS = ("#0969da", "#d1570a", "#1a7f37", "#8250df")


def curve(run: Path) -> tuple[list[float], list[float]]:
    """(minutes of training, accuracy) at each evaluation; minutes are the sum of the phases of all steps before."""
    minutes, accuracy, spent = [], [], 0.0
    for row in read_metrics(run / "metrics.jsonl"):
        spent += sum(v for k, v in row.items() if k.startswith("time/"))
        if "eval/accuracy" in row:
            minutes.append(spent / 60)
            accuracy.append(row["eval/accuracy"])
    return minutes, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN[,RUN...]")
    parser.add_argument("--output", default="docs/assets/learning-curve.svg")
    parser.add_argument("--target", type=float, help="a level to mark")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        sys.exit("error: drawing needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.6), dpi=120)
    for colour, word in zip(COLOURS, args.runs, strict=False):
        label, _, runs = word.partition("=")
        curves = [curve(Path(run)) for run in runs.split(",")]
        for minutes, accuracy in curves:
            axes.plot(minutes, accuracy, color=colour, alpha=0.35, linewidth=1)
        shortest = min(len(c[0]) for c in curves)
        mean = [np.mean([c[i][:shortest] for c in curves], axis=0) for i in (0, 1)]
        seeds = f" ({len(curves)} seeds)" if len(curves) > 1 else ""
        axes.plot(*mean, color=colour, linewidth=2.2, marker="o", markersize=3, label=label + seeds)
    if args.target is not None:
        axes.axhline(args.target, color="#57606a", linewidth=0.8, linestyle="--")
        axes.text(0, args.target + 0.012, f"{args.target:g}", color="#57606a", fontsize=8)
    axes.set(
        xlabel="minutes of training", ylabel="greedy accuracy, evaluation prompts", ylim=(0, 1.02), title=args.title
    )
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, metadata={"Date": None} if args.output.endswith(".svg") else None)


if __name__ == "__main__":
    main()
