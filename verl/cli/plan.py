"""`verl plan`: which placement and which layouts make a step shortest on the GPUs that there are."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.core.errors import ConfigError, ModelError
from verl.models.config import DecoderConfig
from verl.models.source import read_config
from verl.planning.hardware import USABLE, Hardware
from verl.planning.overrides import overrides
from verl.planning.report import HEADS, data, reasons, refusal, rows
from verl.planning.search import Search
from verl.planning.shape import Role
from verl.planning.space import Problem
from verl.planning.workload import Workload

RATES = ("gpus_per_node", "gpu_memory_gb", "tflops", "hbm_gbps", "link_gbps", "network_gbps")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The machines, in the units of their data sheets; defaults are an H100."""
    flag = parser.add_argument
    flag("--gpus", type=int, required=True, metavar="N", help="GPUs that there are")
    flag("--gpus_per_node", type=int, default=8, metavar="N", help="GPUs of one machine (default 8)")
    flag(
        "--gpu_memory_gb",
        type=float,
        default=80.0,
        metavar="GB",
        help=f"of a GPU; a plan fills {USABLE:g} of it (default 80)",
    )
    flag(
        "--tflops",
        type=float,
        default=989.0,
        metavar="T",
        help="10^12 operations a second of a GPU in bf16 (default 989)",
    )
    flag("--hbm_gbps", type=float, default=3350.0, metavar="GB/s", help="memory bandwidth of a GPU (default 3350)")
    flag("--link_gbps", type=float, default=900.0, metavar="GB/s", help="of a GPU within its node (default 900)")
    flag("--network_gbps", type=float, default=50.0, metavar="GB/s", help="of a GPU between nodes (default 50)")
    flag("--top", type=int, default=5, metavar="N", help="plans to show (default 5)")
    flag("--json", action="store_true", help="print the plans as JSON")


def run(cfg: RunConfig, options: argparse.Namespace, config: str, stream: TextIO | None = None) -> int:
    """Print the best plans. config: what stood before the overrides on the command line, to write the next command."""
    if options.top < 1:
        raise ConfigError(f"--top: {options.top} must be 1 or more")
    problem = problem_of(cfg, Hardware(options.gpus, **{rate: getattr(options, rate) for rate in RATES}))
    search = Search(problem)
    plans = search.best(options.top)
    if not plans:
        raise ConfigError(refusal(problem, search))
    if options.json:
        print(json.dumps(data(plans, problem, search, cfg.parallel), indent=2), file=stream or sys.stdout)
        return 0
    console = Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False)
    for line in _given(cfg, problem):
        console.print(line, soft_wrap=True)
    console.print(_table(rows(plans, problem)))
    for line in reasons(plans[0], problem, search):
        console.print(line, soft_wrap=True)
    console.print("\nThe first, to paste:", soft_wrap=True)
    console.print(" ".join(["verl train", config, *overrides(plans[0], cfg.parallel)]), soft_wrap=True)
    return 0


def problem_of(cfg: RunConfig, hardware: Hardware) -> Problem:
    """The roles that the algorithm needs, with the shapes of their models; reads configs only."""
    algorithm, width = Algorithm(cfg), 2 if cfg.model.dtype == "bfloat16" else 4
    own = shape_of("actor.path", cfg.actor.path, cfg)
    scores = bool({"old_logprobs", "sum_pi_squared"} & algorithm.needs)
    roles = [Role("actor", own, width, trains=True, scores=scores)]
    if "ref_logprobs" in algorithm.needs:
        shape = shape_of("ref.path", cfg.ref.path, cfg) if cfg.ref.path else own
        roles.append(Role("ref", shape, width))
    if "values" in algorithm.needs:
        shape = shape_of("critic.path", cfg.critic.path, cfg) if cfg.critic.path else own
        roles.append(Role("critic", shape, width, head=False, trains=True))
    path, reward = cfg.reward.model_path, None
    if path is not None:
        reward = Role("reward", shape_of("reward.model_path", path, cfg), width, head=False)
    return Problem(hardware, Workload.of(cfg), tuple(roles), reward)


def shape_of(key: str, path: str, cfg: RunConfig) -> DecoderConfig:
    """Of a model as in actor.path, or of a config.json alone. ModelError where verl's decoder does not know it."""
    try:
        return DecoderConfig.from_hf(read_config(path, cfg.model.trust_remote_code))
    except ModelError as e:
        raise ModelError(f"{key}: a plan needs the shape of the model: {e}") from e


def _given(cfg: RunConfig, problem: Problem) -> list[str]:
    """What the plan is for, in two lines."""
    work, hw = problem.work, problem.hardware
    models = [*problem.roles, *([problem.reward] if problem.reward else [])]
    sizes = ", ".join(f"{role.name} {role.shape.num_params(role.head) / 1e9:.2f}B" for role in models)
    return [
        f"Algorithm {cfg.algorithm.name}: {sizes} parameters, {cfg.model.dtype}. A step: {work.prompts:,} prompts of "
        f"{work.prompt_tokens:,} tokens x {work.samples} responses of {work.response_tokens:,}, "
        f"{work.epochs * work.mini_batches} updates.",
        f"{hw.gpus} GPUs, {hw.gpus_per_node} a node, {hw.gpu_memory_gb:g} GB each. Seconds are floors at the given "
        "rates: good for comparing plans, not for forecasting a run (docs/planning.md).",
    ]


def _table(lines: list[tuple[str, ...]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in HEADS:
        wide = head in ("placement", "layout")
        table.add_column(head, justify="left" if wide else "right", overflow="fold", no_wrap=not wide)
    for line in lines:
        table.add_row(*line)
    return table
