"""All roles on Ray, in pools as the placement says: roles of one pool share its processes and take turns."""

from __future__ import annotations

from functools import partial

import torch

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.controller.executors.ray import Cluster, ResourcePool
from verl.controller.executors.ray_group import RayGroup
from verl.controller.rank import Make, Rank
from verl.controller.worker import Worker
from verl.parallel.layout import generation_tp, layout_of, pools_of
from verl.trainer.loop import Roles
from verl.trainer.roles import Placed, make_actor, make_critic, make_reference, make_reward_model
from verl.weights.groups import generation_places
from verl.weights.publisher import InProcessPublisher
from verl.workers.group_engine import GroupEngine
from verl.workers.reward_model import RewardModelGroup


def on_ray(cfg: RunConfig, algorithm: Algorithm, device: str, total_steps: int) -> Placed:
    """Start the processes and make the workers there. Whatever fails, none is left."""
    p, pools = cfg.parallel, pools_of(cfg.parallel, algorithm.roles)
    sizes = [layout_of(p, roles[0]).world for roles in pools]
    threads = p.threads or max(1, torch.get_num_threads() // sum(sizes))
    cluster = Cluster(cpus=threads * sum(sizes), address=p.address, deadline=p.deadline)
    try:
        backend = "nccl" if device == "cuda" else "gloo"
        gpus = int(device == "cuda")
        made = [ResourcePool(cluster, size, threads, gpus=gpus, threads=threads, backend=backend) for size in sizes]
        of_role = {role: pool for pool, roles in zip(made, pools, strict=True) for role in roles}
        return _placed(cfg, algorithm, device, total_steps, cluster, of_role)
    except BaseException:
        cluster.close()
        raise


def _placed(
    cfg: RunConfig,
    algorithm: Algorithm,
    device: str,
    total_steps: int,
    cluster: Cluster,
    pools: dict[str, ResourcePool],
) -> Placed:
    makes: dict[str, Make] = {
        "actor": partial(_actor, cfg, device, total_steps),
        "ref": partial(make_reference, cfg, device),
        "critic": partial(make_critic, cfg, device, total_steps),
        "reward": partial(make_reward_model, cfg, device),
    }
    groups = {
        role: RayGroup(pool, role, layout_of(cfg.parallel, role), makes[role], together=cfg.update.share_prompt)
        for role, pool in pools.items()
    }
    actor = groups["actor"]
    engine = GroupEngine(actor, generation_places(actor.layout, generation_tp(cfg.parallel)))
    said = actor.call("described").result()
    apart = frozenset(role for role, pool in pools.items() if pool is not pools["actor"])
    roles = Roles(actor, groups.get("ref"), groups.get("critic"), apart)
    judge = RewardModelGroup(groups["reward"], groups["reward"].layout.dp) if "reward" in groups else None
    return Placed(roles, judge, engine, InProcessPublisher(engine, dict), said, cluster.close)


def _actor(cfg: RunConfig, device: str, total_steps: int, rank: Rank) -> Worker:
    """Each process has an algorithm of its own, for the loss; credit is the controller's."""
    return make_actor(cfg, Algorithm(cfg), device, total_steps, rank)
