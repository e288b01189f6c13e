"""The workers of each role, made from the configuration in the process where they live; and all of them embedded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.controller.executors.local import LocalGroup
from verl.controller.rank import Rank
from verl.core.protocols import RolloutEngine
from verl.core.rng import derive_seed
from verl.engines import rollout
from verl.engines.resharding import generation_axis
from verl.models.load import load_policy, load_reward_model, load_value_model
from verl.parallel.layout import generation_tp
from verl.parallel.mesh import SINGLE, Mesh
from verl.trainer.loop import Roles
from verl.utils.heap import settle
from verl.weights.groups import generation_places
from verl.weights.publisher import Publishes
from verl.workers.actor_rollout import ActorRolloutWorker
from verl.workers.critic import CriticWorker
from verl.workers.reference import ReferenceWorker
from verl.workers.reward_model import RewardModelGroup, RewardModelWorker

ALONE = Rank()
"""The only process there is."""


@dataclass(frozen=True)
class Placed:
    """The roles where the configuration puts them. judge: the reward model, where there is one; said: what the actor
    is, for the log; close: ends processes.
    """

    roles: Roles
    judge: RewardModelGroup | None
    engine: RolloutEngine
    publisher: Publishes
    said: tuple[str, str]
    close: Callable[[], None]


def embedded(cfg: RunConfig, algorithm: Algorithm, device: str, total_steps: int) -> Placed:
    """All roles in this process."""
    actor = make_actor(cfg, algorithm, device, total_steps, ALONE)
    roles = Roles(
        LocalGroup(actor),
        LocalGroup(make_reference(cfg, device, ALONE)) if "ref_logprobs" in algorithm.needs else None,
        LocalGroup(make_critic(cfg, device, total_steps, ALONE)) if "values" in algorithm.needs else None,
    )
    judge = RewardModelGroup(LocalGroup(make_reward_model(cfg, device, ALONE))) if algorithm.has_reward_model else None
    return Placed(roles, judge, actor.generator, actor.publisher, actor.described(), lambda: None)


def make_actor(cfg: RunConfig, algorithm: Algorithm, device: str, total_steps: int, rank: Rank) -> ActorRolloutWorker:
    """The policy and its sampler, which reads the policy's own weights wherever both are cut alike."""
    _begin(device)
    mesh = _mesh(rank, device)
    policy = load_policy(cfg.actor.path, cfg.model, device, mesh.tensor(), mesh.pipeline())
    tp, copy = mesh.tensor(), None
    if not rank.layout.generates_in_place(generation_tp(cfg.parallel)):
        tp = generation_axis(generation_places(rank.layout, generation_tp(cfg.parallel)))
        copy = load_policy(cfg.actor.path, cfg.model, device, tp)
        copy.requires_grad_(False)
    engine = rollout.attach(cfg.rollout.backend, policy if copy is None else copy, cfg.rollout)
    return ActorRolloutWorker(policy, cfg, algorithm, device, total_steps, engine, mesh, copy, tp)


def make_reference(cfg: RunConfig, device: str, rank: Rank) -> ReferenceWorker:
    """The frozen policy."""
    _begin(device)
    mesh = _mesh(rank, device)
    policy = load_policy(cfg.ref.path or cfg.actor.path, cfg.model, device, mesh.tensor(), mesh.pipeline())
    return ReferenceWorker(policy, cfg, device, mesh)


def make_critic(cfg: RunConfig, device: str, total_steps: int, rank: Rank) -> CriticWorker:
    _begin(device)
    mesh = _mesh(rank, device)
    seed = derive_seed(cfg.trainer.seed, "critic")
    path = cfg.critic.path or cfg.actor.path
    model = load_value_model(path, cfg.model, device, seed, mesh.tensor(), mesh.pipeline())
    return CriticWorker(model, cfg, device, total_steps, mesh)


def make_reward_model(cfg: RunConfig, device: str, rank: Rank) -> RewardModelWorker:
    _begin(device)
    assert cfg.reward.model_path is not None
    model = load_reward_model(cfg.reward.model_path, cfg.model, device, cfg.reward.max_length)
    return RewardModelWorker(model, _mesh(rank, device))


def _begin(device: str) -> None:
    if device == "cpu":
        settle()


def _mesh(rank: Rank, device: str) -> Mesh:
    return Mesh.of(rank.layout, device) if rank.world > 1 else SINGLE
