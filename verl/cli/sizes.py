"""The table of sizes that a dry run prints: everything in its unit, before any model is loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from verl.config.run import RunConfig
from verl.engines.train.micro_batches import tokens_at_once
from verl.trainer.build import Inputs, read_inputs
from verl.trainer.device import pick_device
from verl.trainer.memory import KV_CACHE, Peak, RoleMemory, estimate

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Counts:
    """What the data set gives. longest_prompt: tokens; steps_per_episode: already cut as configured."""

    train: int
    eval: int
    longest_prompt: int
    steps_per_episode: int

    @classmethod
    def of(cls, cfg: RunConfig, inputs: Inputs) -> Counts:
        whole, data = inputs.sampler.steps_per_episode, inputs.data
        steps = min(whole, cfg.trainer.max_steps_per_episode or whole)
        return cls(len(data.train), len(data.eval), data.longest, steps)


def step_rows(cfg: RunConfig, counts: Counts) -> list[Row]:
    """(what, how many, where it comes from) of a step and of the whole run."""
    prompts, n, parts = cfg.trainer.prompts_per_step, cfg.rollout.n, cfg.update.mini_batches
    samples, episodes = prompts * n, cfg.trainer.num_episodes
    least, more = divmod(prompts, parts)
    groups = f"{least} to {least + 1}" if more else str(least)
    members = f"{least * n} to {(least + 1) * n}" if more else str(least * n)
    updates = cfg.update.epochs * parts
    longest, steps = counts.longest_prompt + cfg.rollout.max_response_tokens, counts.steps_per_episode
    at_once = tokens_at_once(cfg.update, pick_device(cfg))
    return [
        ("prompts to train on", f"{counts.train:,}", "data.dataset, data.size"),
        ("prompts to evaluate on", f"{counts.eval:,}", "data.eval_size"),
        ("prompts a step", f"{prompts:,}", "trainer.prompts_per_step"),
        ("samples a prompt", f"{n:,}", "rollout.n"),
        ("samples a step", f"{samples:,}", "prompts a step x samples a prompt"),
        ("mini-batches a pass", f"{parts:,}", "update.mini_batches"),
        ("prompts in a mini-batch", groups, "prompts a step / mini-batches"),
        ("samples in a mini-batch", members, "x samples a prompt"),
        ("longest sequence, tokens", f"{longest:,}", "longest prompt here + rollout.max_response_tokens"),
        ("micro-batch, tokens at most", f"{at_once:,}", "update.micro_batch_tokens"),
        ("micro-batch, longest sequences in it", f"{max(1, at_once // longest):,}", "at the greatest length"),
        ("tokens a step, at most", f"{samples * longest:,}", "samples a step x longest sequence"),
        ("optimizer steps a step", f"{updates:,}", "update.epochs x mini-batches"),
        ("steps an episode", f"{steps:,}", "prompts / prompts a step, trainer.max_steps_per_episode"),
        ("planned steps", f"{episodes * steps:,}", "x trainer.num_episodes"),
        ("planned optimizer steps", f"{episodes * steps * updates:,}", "x optimizer steps a step"),
    ]


def memory_rows(roles: list[RoleMemory]) -> list[Row]:
    """(role, part, GB) of every role, then the peak."""
    rows: list[Row] = []
    for role in roles:
        count = f"{role.num_params / 1e6:,.1f} M parameters" if role.num_params else f"unknown: {role.why}"
        rows.append((role.role, f"{role.path}, {count}", ""))
        rows += [("", part, f"{gb:.2f}") for part, gb in {**role.kept, **role.passing}.items()]
    return rows


def print_sizes(cfg: RunConfig, stream: TextIO | None = None) -> None:
    """Read the data and the models' configs, and print both tables. Raises what the run itself would raise for them."""
    inputs = read_inputs(cfg)
    cfg = inputs.cfg
    console = Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False)
    for line in inputs.data.report.lines():
        console.print(line, soft_wrap=True)
    if inputs.said:
        console.print(inputs.said, soft_wrap=True)
    counts = Counts.of(cfg, inputs)
    console.print(_table(("size", "", "from"), step_rows(cfg, counts)))
    roles = estimate(cfg, inputs.algorithm, counts.longest_prompt + cfg.rollout.max_response_tokens)
    device = pick_device(cfg)
    console.print(_table(("role", "estimate", "GB"), memory_rows(roles), last_right=True))
    console.print(_verdict(cfg, roles, device), soft_wrap=True)


def _verdict(cfg: RunConfig, roles: list[RoleMemory], device: str) -> str:
    peak = Peak.of(cfg, roles)
    known = "" if all(role.num_params for role in roles) else ", not counting the roles whose size is unknown"
    name = "GPU memory" if device == "cuda" else "host memory"
    said = "" if peak.count == 1 else ", of the process that holds most"
    if peak.count > 1 and peak.together:
        said = f", in {peak.count} processes"
    text = f"Peak, estimated: {peak.gb:.2f} GB of {peak.have:.1f} GB {name}{said}{known}."
    if not peak.fits:
        text += (
            f" That will not fit: {_generation_advice(cfg, roles)}lower update.micro_batch_tokens or "
            "rollout.max_sequences, set update.activation_checkpointing=true, or take a smaller model."
        )
    return text


def _generation_advice(cfg: RunConfig, roles: list[RoleMemory]) -> str:
    """What to lower where generation's cache is what takes most; "" where it is something else."""
    parts = [part for role in roles for part in (role.kept | role.passing).items()]
    if not parts or max(parts, key=lambda part: part[1])[0] != KV_CACHE:
        return ""
    prefixes = cfg.rollout.prefix_cache_gb
    lower = f"lower rollout.prefix_cache_gb (now {prefixes:g}), " if prefixes > 0 else ""
    limit = cfg.rollout.kv_cache_gb
    return lower + ("set rollout.kv_cache_gb, " if limit is None else f"lower rollout.kv_cache_gb (now {limit:g}), ")


def _table(heads: Row, rows: list[Row], last_right: bool = False) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(heads[0], no_wrap=True)
    table.add_column(heads[1], justify="left" if last_right else "right", overflow="fold")
    table.add_column(heads[2], justify="right" if last_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
