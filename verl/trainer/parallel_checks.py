"""What can be known of processes and layouts before a model loads. Each error names the value to change."""

from __future__ import annotations

import importlib.util
import os

import torch

from verl.algos.algorithm import Algorithm
from verl.config.parallel import ParallelConfig
from verl.config.run import RunConfig
from verl.core.errors import ConfigError, MissingDependency, ModelError
from verl.models.config import DecoderConfig
from verl.models.cuts import Cuts, Stage
from verl.models.source import resolve
from verl.parallel.layout import Layout, generation_tp, layout_of, pools_of

_CROWD = 8
"""Processes to a CPU: more of them only wait for each other."""


def check_parallel(cfg: RunConfig, algorithm: Algorithm, device: str) -> None:
    """The processes can be had, and are cut as the roles can be."""
    p = cfg.parallel
    if p.executor == "embedded":
        for name, value in p:
            if name == "fsdp" and value in (1, -1):
                continue  # the only process shares with none, and all of them are this one
            if name not in ("executor", "deadline") and value != type(p).model_fields[name].default:
                said = value if isinstance(value, int | str) else "its layout"
                many = "" if name in ("address", "nproc", "threads") else " and parallel.nproc to how many"
                raise ConfigError(
                    f"parallel.{name}: {said} needs other processes than this; set parallel.executor=ray{many}"
                )
        return
    if importlib.util.find_spec("ray") is None:
        raise MissingDependency('parallel.executor: ray is not installed; run: pip install -e ".[ray]"')
    roles = algorithm.roles
    _check_sections(p, roles)
    layouts = {role: layout_of(p, role) for role in roles}
    total = sum(layouts[shared[0]].world for shared in pools_of(p, roles))
    actor = layouts["actor"]
    for role, layout in layouts.items():
        if cfg.model.implementation == "transformers" and layout.tp * layout.pp > 1:
            raise ConfigError(
                f"parallel: tp {layout.tp} and pp {layout.pp} of the {role} need verl's own decoder; set them to 1 "
                "(fsdp cuts any model), or model.implementation=native"
            )
    _check_generation(cfg, actor)
    most = _CROWD * (os.cpu_count() or 1)
    if device == "cpu" and p.address is None and total > most:
        raise ConfigError(f"parallel.nproc: {total} processes are too many for {os.cpu_count()} CPUs; at most {most}")
    if device == "cuda" and p.address is None and total > torch.cuda.device_count():
        raise ConfigError(
            f"parallel.nproc: {total} processes need a GPU each, this machine has {torch.cuda.device_count()}; lower it"
        )


def _check_sections(p: ParallelConfig, roles: list[str]) -> None:
    """What is said of a role, or of its place, has a role to act on."""
    for role, section in (("ref", p.ref), ("critic", p.critic), ("reward", p.reward)):
        if role not in roles and section != type(section)():
            none = "there is no reward model" if role == "reward" else f"this algorithm has no {role}"
            raise ConfigError(f"parallel.{role}: {none}, so it does nothing; leave it out")
    if p.placement != "colocated" and len(pools_of(p, roles)) == 1:
        raise ConfigError(
            f"parallel.placement: {p.placement} puts nothing apart, as this run has only {' and '.join(roles)}; set "
            "colocated"
        )


def check_cuts(cfg: RunConfig, algorithm: Algorithm) -> None:
    """Every role's model can be cut as its layout says; reads configs only."""
    if cfg.parallel.executor == "embedded":
        return
    paths = {"actor": None, "ref": cfg.ref.path, "critic": cfg.critic.path}
    for role in algorithm.roles:
        layout, section = layout_of(cfg.parallel, role), "parallel" if role == "actor" else f"parallel.{role}"
        generating = generation_tp(cfg.parallel) if role == "actor" else 1
        if layout.tp * layout.pp * generating == 1:
            continue
        path = paths[role] or cfg.actor.path
        shape = DecoderConfig.from_hf(resolve(path, cfg.model.trust_remote_code).hf_config())
        try:
            Cuts(shape, layout.tp)
            Stage(0, layout.pp, shape.num_layers)
        except ModelError as e:
            raise ConfigError(str(e).replace("parallel.*", section)) from e
        try:
            Cuts(shape, generating)
        except ModelError as e:
            raise ConfigError(str(e).replace("parallel.*.tp", "parallel.generation_tp")) from e


def _check_generation(cfg: RunConfig, actor: Layout) -> None:
    """Replicas that generate can be made of the actor's processes."""
    p = cfg.parallel
    tp = generation_tp(p)
    if actor.world % tp:
        raise ConfigError(
            f"parallel.generation_tp: {tp} does not divide the actor's {actor.world} processes; set a divisor"
        )
    if tp > 1 and cfg.rollout.backend != "native":
        raise ConfigError(
            f"parallel.generation_tp: rollout.backend={cfg.rollout.backend} generates in one process each, not in "
            f"{tp}; set parallel.generation_tp=1, or rollout.backend=native"
        )
