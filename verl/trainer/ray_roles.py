"""All roles on Ray: one pool, whose processes each hold every role and a part of the batch."""

from __future__ import annotations

from functools import partial

import torch

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.controller.executors.ray import Cluster, ResourcePool
from verl.controller.executors.ray_group import RayGroup
from verl.controller.rank import Make, Rank
from verl.controller.worker import Worker
from verl.parallel.layout import Layout
from verl.trainer.loop import Roles
from verl.trainer.roles import Placed, make_actor, make_critic, make_reference
from verl.weights.publisher import InProcessPublisher
from verl.workers.group_engine import GroupEngine


def on_ray(cfg: RunConfig, algorithm: Algorithm, device: str, total_steps: int) -> Placed:
    """Start the processes and make the workers there. Whatever fails, none is left."""
    p = cfg.parallel
    threads = p.threads or max(1, torch.get_num_threads() // p.nproc)
    cluster = Cluster(cpus=threads * p.nproc, address=p.address, deadline=p.deadline)
    try:
        return _placed(cfg, algorithm, device, total_steps, cluster, threads)
    except BaseException:
        cluster.close()
        raise


def _placed(
    cfg: RunConfig, algorithm: Algorithm, device: str, total_steps: int, cluster: Cluster, threads: int
) -> Placed:
    on_gpu = device == "cuda"
    pool = ResourcePool(
        cluster, cfg.parallel.nproc, threads, gpus=int(on_gpu), threads=threads, backend="nccl" if on_gpu else "gloo"
    )
    layout = Layout(dp=pool.world)

    def group(role: str, make: Make) -> RayGroup:
        return RayGroup(pool, role, layout, make, together=cfg.update.share_prompt)

    actor = group("actor", partial(_actor, cfg, device, total_steps))
    needs = algorithm.needs
    roles = Roles(
        actor,
        group("ref", partial(make_reference, cfg, device)) if "ref_logprobs" in needs else None,
        group("critic", partial(make_critic, cfg, device, total_steps)) if "values" in needs else None,
    )
    engine = GroupEngine(actor, pool.world)
    said = actor.call("described").result()
    return Placed(roles, engine, InProcessPublisher(engine, dict), said, cluster.close)


def _actor(cfg: RunConfig, device: str, total_steps: int, rank: Rank) -> Worker:
    """Each process has an algorithm of its own, for the loss; credit is the controller's."""
    return make_actor(cfg, Algorithm(cfg), device, total_steps, rank)
