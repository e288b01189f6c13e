"""Resharding, four ways: {all-gather, planned} x {consecutive, strided groups}: bytes, memory and seconds of a rank.

Processes on this machine move the weights of a decoder from a training layout to a generation layout, the four ways by
turns in the same processes; a first turn, which does not count, checks the values of each way. --plan_only makes the
plan alone, which needs neither the memory nor the ranks.

    python benchmarks/reshard.py                          # 135M, tp 4 to 2: four processes over gloo
    python benchmarks/reshard.py --tp 2 --pp 2 --gen_tp 1
    python benchmarks/reshard.py --dp 4 --fsdp 4 --tp 1 --gen_tp 2
    python benchmarks/reshard.py --plan_only --model 8b --dp 8 --fsdp 8 --tp 8 --gen_tp 2

As it is: about a minute on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cases.arguments import at_least, parser
from cases.decoders import DECODERS
from common import Spread, header
from verl.cli.arguments import run_main
from verl.core.errors import VerlError
from verl.parallel.layout import Coord, Layout
from verl.weights.groups import Groups, generation_coords
from verl.weights.plan import Shard, plan
from verl.weights.shards import Parameter, shards

if TYPE_CHECKING:
    import torch

    from verl.weights.gather import AllGather
    from verl.weights.route import Route
    from verl.weights.transport import Transport

GROUPS: tuple[Groups, ...] = ("consecutive", "strided")
SIDES = tuple(f"{arm} {groups}" for arm in ("all-gather", "planned") for groups in GROUPS)
ITEM = {"bfloat16": 2, "float32": 4}
_MEGA = 1e6


@dataclass(frozen=True)
class Setting:
    """What is moved: parameters of one dtype, and both layouts."""

    parameters: tuple[Parameter, ...]
    dtype: str
    train: Layout
    generation: Layout
    bucket: int
    runs: int
    device: str

    def coords(self, groups: Groups) -> tuple[Coord, ...]:
        return generation_coords(self.train, self.generation, groups)

    def wanted(self, groups: Groups) -> list[Shard]:
        return shards(self.parameters, self.generation, self.coords(groups))

    @property
    def nbytes(self) -> int:
        return sum(prod(p.shape) for p in self.parameters) * ITEM[self.dtype]


def main() -> int:
    args = _arguments()
    setting = _setting(args)
    lines = [_plan_line(setting, groups) for groups in GROUPS] if args.plan_only else _report(setting, measure(setting))
    print(header({}, setting.device))
    train, generation = setting.train, setting.generation
    print(
        f"model     {args.model}: {len(setting.parameters)} tensors, {setting.nbytes / _MEGA:,.1f} MB in {args.dtype}\n"
        f"layouts   training dp {train.dp} (fsdp {train.fsdp}) x pp {train.pp} x tp {train.tp}, "
        f"generation dp {generation.dp} x pp {generation.pp} x tp {generation.tp}; {train.world} ranks, "
        f"buckets of {args.bucket_mb} MiB"
    )
    print("\n".join(lines))
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--model", choices=sorted(DECODERS), default="135m", help="sizes of the decoder")
    flags.add_argument("--dtype", choices=sorted(ITEM), default="bfloat16", help="of all weights")
    flags.add_argument("--dp", type=at_least(1), default=1, help="training: data parallel ranks")
    flags.add_argument("--fsdp", type=at_least(1), default=1, help="training: of those, ranks that share one copy")
    flags.add_argument("--pp", type=at_least(1), default=1, help="training: pipeline stages")
    flags.add_argument("--tp", type=at_least(1), default=4, help="training: tensor parallel ranks")
    flags.add_argument("--gen_pp", type=at_least(1), default=1, help="generation: pipeline stages")
    flags.add_argument("--gen_tp", type=at_least(1), default=2, help="generation: tensor parallel ranks")
    flags.add_argument("--bucket_mb", type=at_least(1), default=16, help="MiB under way a rank and direction, at most")
    flags.add_argument("--runs", type=at_least(1), default=5, help="turns of each way that count; one more warms up")
    flags.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo between CPUs, or NCCL")
    flags.add_argument("--plan_only", action="store_true", help="make the plan and count, and move nothing")
    args = flags.parse_strictly(sys.argv[1:])
    try:
        setting = _setting(args)
        shards(setting.parameters, setting.train)
        for groups in GROUPS:
            setting.wanted(groups)
    except VerlError as e:
        flags.error(str(e))
    if args.device == "cuda" and not args.plan_only:
        import torch

        if (count := torch.cuda.device_count()) < setting.train.world:
            flags.error(f"--device cuda: {setting.train.world} ranks need a GPU each, there are {count}")
    return args


def _setting(args: argparse.Namespace) -> Setting:
    train = Layout(args.dp, args.pp, args.tp, args.fsdp)
    generation = Layout(max(1, train.world // (args.gen_pp * args.gen_tp)), args.gen_pp, args.gen_tp)
    parameters = DECODERS[args.model].parameters()
    return Setting(parameters, args.dtype, train, generation, args.bucket_mb << 20, args.runs, args.device)


def measure(setting: Setting) -> list[dict[str, Any]]:
    """What each rank saw: per side its seconds (a list) and its traffic."""
    with tempfile.TemporaryDirectory() as folder:
        context: Any = mp.get_context("forkserver" if setting.device == "cpu" else "spawn")
        if setting.device == "cpu":
            context.set_forkserver_preload(["verl.weights.gather"])  # one import of torch for all ranks
        ranks = [context.Process(target=run_rank, args=(n, folder, setting)) for n in range(setting.train.world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"error: ranks ended with {[rank.exitcode for rank in ranks]}; their messages are above")
        return [json.loads((Path(folder) / f"{n}.json").read_text()) for n in range(len(ranks))]


def run_rank(rank: int, folder: str, setting: Setting) -> None:
    """One process: the four ways by turns, then what they took into a file."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu") if setting.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=setting.train.world)
    routes = {groups: _route(setting, groups, rank) for groups in GROUPS}
    have = {name: _values(setting, name, box, device) for name, box in routes["strided"].holds.items()}
    sides = {side: _side(side, setting, routes, device) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(setting.runs + 1):
        for side, arm in sides.items():
            dist.barrier()
            start = time.perf_counter()
            got = arm.collect(have)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[side].append(time.perf_counter() - start)
            else:
                _check(setting, got, routes[cast(Groups, side.split()[1])], device)
            del got
    out = {side: {"seconds": seconds[side], **asdict(arm.traffic)} for side, arm in sides.items()}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(out))
    dist.destroy_process_group()


def _route(setting: Setting, groups: Groups, rank: int) -> Route:
    import torch

    from verl.weights.route import Route

    src, dst = shards(setting.parameters, setting.train), setting.wanted(groups)
    dtypes = {p.name: cast("torch.dtype", getattr(torch, setting.dtype)) for p in setting.parameters}
    return Route.of(rank, plan(src, dst), src, dst, dtypes, setting.bucket)


def _side(side: str, setting: Setting, routes: dict[Groups, Route], device: torch.device) -> Transport | AllGather:
    from verl.weights.gather import AllGather
    from verl.weights.transport import Transport

    arm, groups = side.split()
    route = routes[cast(Groups, groups)]
    if arm == "planned":
        return Transport(route, device=device)
    return AllGather(setting.parameters, route.dtypes, setting.train, route.wants, device)


def _values(setting: Setting, name: str, box: Any, device: torch.device) -> torch.Tensor:
    """The part of a parameter in the box; its elements count up from a number of its own."""
    import torch

    number, shape = next((i, p.shape) for i, p in enumerate(setting.parameters) if p.name == name)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, (start, end) in zip(shape, box, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(start, end, device=device)
    return ((index + number) % 251).to(getattr(torch, setting.dtype))


def _check(setting: Setting, got: dict[str, torch.Tensor], route: Route, device: torch.device) -> None:
    wrong = [
        name
        for name, box in route.wants.items()
        if name not in got or not got[name].equal(_values(setting, name, box, device))
    ]
    assert not wrong, f"rank {route.rank}: {wrong[:3]} arrived wrong"


def _report(setting: Setting, ranks: list[dict[str, Any]]) -> list[str]:
    """The table: the busiest rank's bytes and memory, and the seconds of the slowest rank in each turn."""
    lines = [
        f"{'':24}{'received MB':>26}{'extra MB':>12}{'seconds (slowest rank)':>32}",
        f"{'':24}{'least':>9}{'most':>9}{'share':>8}{'most':>12}{'min':>14}{'median':>9}{'max':>9}",
    ]
    most = {side: max(rank[side]["received"] for rank in ranks) for side in SIDES}
    for side in SIDES:
        received = [rank[side]["received"] / _MEGA for rank in ranks]
        peak = max(rank[side]["peak"] for rank in ranks) / _MEGA
        slowest = [max(turn) for turn in zip(*(rank[side]["seconds"] for rank in ranks), strict=True)]
        share = most[side] / most[SIDES[0]] if most[SIDES[0]] else 0.0
        cells = f"{min(received):>9.1f}{max(received):>9.1f}{share:>8.2f}{peak:>12.1f}"
        lines.append(f"{side:24}{cells}{'':5}{Spread.of(slowest).cells()}")
    held, used = setting.train.tp * setting.train.pp * setting.train.fsdp, setting.generation.tp * setting.generation.pp
    total = setting.nbytes / _MEGA
    gathered, planned = total * (held - 1) / held, total * max(0, held - used) / held / used
    return [
        *lines,
        f"formulas  all-gather M (n - 1) / n = {gathered:,.1f} MB, planned strided M (n - g) / (g n) = {planned:,.1f}",
        f"          MB, generation M / g = {total / used:,.1f} MB (n = {held}, g = {used}, all parameters cut evenly)",
    ]


def _plan_line(setting: Setting, groups: Groups) -> str:
    start = time.perf_counter()
    src, dst = shards(setting.parameters, setting.train), setting.wanted(groups)
    made = time.perf_counter()
    transfers = plan(src, dst)
    planned = time.perf_counter()
    route = _route(setting, groups, 0)
    routed = time.perf_counter()
    received = [0] * setting.train.world
    for transfer in transfers:
        if transfer.src != transfer.dst:
            received[transfer.dst] += transfer.numel * ITEM[setting.dtype]
    seconds = (
        f"shards {made - start:.2f}, plan {planned - made:.2f}, both and one rank's route {routed - planned:.2f} s"
    )
    return (
        f"{groups:12} {len(src):,} to {len(dst):,} shards, {len(transfers):,} transfers, {len(route.rounds)} rounds; "
        f"received {min(received) / _MEGA:,.1f} to {max(received) / _MEGA:,.1f} MB a rank; {seconds}"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
