"""From a checked config to a trainer: data and rewards first, so that bad input fails before any model loads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.algos.algorithm import Algorithm
from verl.checkpoint.store import CheckpointStore
from verl.config.run import RunConfig
from verl.controller.executors.local import LocalGroup
from verl.core.errors import ConfigError, DataError
from verl.core.protocols import RewardFn
from verl.core.rng import derive_seed
from verl.data.load import PromptData, load_prompts
from verl.data.sampler import PromptSampler
from verl.engines import rollout
from verl.models.load import (
    check_reward_model,
    check_role,
    load_policy,
    load_reward_model,
    load_value_model,
)
from verl.models.reward_model import RewardModel
from verl.models.source import ModelSource, resolve
from verl.rewards.build import build_rewards
from verl.rewards.composer import RewardComposer
from verl.rewards.functions import RewardFunction
from verl.trainer.evaluate import Evaluator, evaluation_params
from verl.trainer.folder import RunFolder
from verl.trainer.log import LogHook
from verl.trainer.loop import Roles, Trainer
from verl.trainer.resume import CheckpointHook, identity
from verl.trainer.reward import RewardScorer
from verl.trainer.source import OnDemandSource
from verl.utils.console import RunConsole
from verl.utils.tracking.tracker import Tracker, check_installed, check_sinks
from verl.weights.publisher import InProcessPublisher
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.reference import ReferenceWorker
from verl.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Inputs:
    """All that is checked before a model loads."""

    algorithm: Algorithm
    source: ModelSource
    tokenizer: Any
    data: PromptData
    sampler: PromptSampler
    composer: RewardComposer


@dataclass(frozen=True)
class Run:
    """A trainer with what belongs to its folder."""

    trainer: Trainer
    folder: RunFolder
    tracker: Tracker


def check_training_law(cfg: RunConfig) -> None:
    """The trainer recomputes log-probs of the whole tempered law; a truncated one would make every ratio wrong."""
    s = cfg.rollout.sampling
    for name, value, whole in (("top_p", s.top_p, 1.0), ("top_k", s.top_k, 0), ("min_tokens", s.min_tokens, 0)):
        if value != whole:
            raise ConfigError(
                f"rollout.sampling.{name}: training samples must come from the whole law, so that the trainer's "
                f"log-probs are the sampler's; set {whole:g} here (evaluation may use eval.sampling.{name}={value:g})"
            )
    if s.temperature <= 0:
        raise ConfigError("rollout.sampling.temperature: training needs samples that differ; set it above 0, such as 1")


def check_outputs(cfg: RunConfig) -> None:
    """What the run writes, and where: a sink that is missing, or a folder that something is read from."""
    check_sinks(cfg.trainer.sinks)
    check_installed(cfg.trainer.sinks)
    if cfg.trainer.resume and cfg.trainer.overwrite:
        raise ConfigError("trainer.resume: cannot go on with a run that trainer.overwrite removes; keep one of them")
    out = os.path.expanduser(cfg.trainer.output_dir)
    read = {
        "actor.path": cfg.actor.path,
        "ref.path": cfg.ref.path,
        "critic.path": cfg.critic.path,
        "reward.model_path": cfg.reward.model_path,
        "data.dataset": cfg.data.dataset,
        "data.eval_dataset": cfg.data.eval_dataset,
    }
    for key, path in read.items():
        folder = os.path.expanduser(path or "")
        if os.path.isdir(folder) and os.path.isdir(out) and os.path.samefile(folder, out):
            raise ConfigError(
                f"trainer.output_dir: {out} is also {key}, and the run would replace what it reads there; "
                "choose another folder with --output_dir"
            )


def check_models(cfg: RunConfig, algorithm: Algorithm, source: ModelSource, data: PromptData) -> None:
    """Every model that this run needs is there and fits the actor's tokens and lengths; reads configs only."""
    prompts = [*data.train, *data.eval]
    longest, largest = max(len(p.token_ids) for p in prompts), max(max(p.token_ids) for p in prompts)
    context = getattr(source.hf_config().get_text_config(), "max_position_embeddings", None)
    if context is not None and longest >= context:
        raise DataError(
            f"data.max_prompt_tokens: the longest prompt has {longest} tokens and leaves no room for a response in the "
            f"{context} of {cfg.actor.path}; set it below {context}"
        )
    whole = min(longest + cfg.rollout.max_response_tokens, context or longest + cfg.rollout.max_response_tokens)
    if "ref_logprobs" in algorithm.needs and cfg.ref.path is not None:
        check_role("ref.path", cfg.ref.path, cfg.model, largest, whole)
    if "values" in algorithm.needs and cfg.critic.path is not None:
        check_role("critic.path", cfg.critic.path, cfg.model, largest, whole)
    if cfg.reward.model_path is not None:
        check_reward_model(cfg.reward.model_path, cfg.model)


def pick_device(cfg: RunConfig) -> str:
    wanted = cfg.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device: no usable CUDA device; use --device cpu, or install a torch build for your driver"
        )
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def read_inputs(cfg: RunConfig, functions: Sequence[tuple[RewardFn, float]] = ()) -> Inputs:
    """Everything that can fail without a model."""
    check_training_law(cfg)
    check_outputs(cfg)
    rollout.check(cfg.rollout.backend, cfg.model.implementation)
    evaluation_params(cfg)
    algorithm = Algorithm(cfg)
    source = resolve(cfg.actor.path, cfg.model.trust_remote_code)
    tokenizer = source.tokenizer()
    data = load_prompts(cfg.data, tokenizer, cfg.trainer.seed)
    check_models(cfg, algorithm, source, data)
    sampler = PromptSampler(len(data.train), cfg.trainer.prompts_per_step, cfg.trainer.seed, cfg.data.shuffle)
    own = [RewardFunction.of(fn, weight) for fn, weight in functions]
    composer = build_rewards(cfg.reward, [*data.train, *data.eval], own)
    return Inputs(algorithm, source, tokenizer, data, sampler, composer)


def build(cfg: RunConfig, console: RunConsole, functions: Sequence[tuple[RewardFn, float]] = ()) -> Run:
    """The trainer of a run, restored from its checkpoint where cfg.trainer.resume asks for it.

    The output folder is left as it was until everything that may fail has been read, loaded and accepted.
    """
    inputs = read_inputs(cfg, functions)
    folder = RunFolder(cfg.trainer.output_dir)
    if not cfg.trainer.resume:
        folder.check()
    for line in inputs.data.report.lines():
        console.info(line)
    trainer, worker = _trainer(cfg, inputs, console)
    store = CheckpointStore(folder.checkpoints, cfg.trainer.keep_checkpoints, console.warn)
    checkpoints = CheckpointHook(cfg, store, identity(cfg, inputs.data.fingerprint), console)
    resumed = cfg.trainer.resume and checkpoints.resume(trainer)
    if not resumed and (said := folder.begin(cfg.trainer.overwrite)):
        console.info(said)
    folder.write_config(cfg)
    name = cfg.trainer.run_name or folder.root.resolve().name
    tracker = Tracker(cfg.trainer.sinks, folder.root, name, cfg.model_dump(mode="json"), resume=resumed)
    evaluator = Evaluator(cfg, inputs.data.eval, worker, trainer.reward, folder, console) if inputs.data.eval else None
    trainer.hooks = [LogHook(cfg, tracker, console, evaluator, pick_device(cfg)), checkpoints]
    return Run(trainer, folder, tracker)


def _trainer(cfg: RunConfig, inputs: Inputs, console: RunConsole) -> tuple[Trainer, RolloutWorker]:
    """The models in their roles, and the loop over them."""
    device = pick_device(cfg)
    policy = load_policy(cfg.actor.path, cfg.model, device)
    console.info(f"Actor {cfg.actor.path}: {policy.implementation} implementation, {cfg.model.dtype}, on {device}")
    engine = rollout.attach(cfg.rollout.backend, policy, cfg.rollout)
    worker = RolloutWorker(engine, inputs.tokenizer, cfg.trainer.seed)
    source = OnDemandSource(inputs.data.train, inputs.sampler, worker, cfg)
    steps = cfg.trainer.num_episodes * source.steps_per_episode
    updates = steps * cfg.update.epochs * cfg.update.mini_batches
    actor = ActorWorker(policy, cfg, inputs.algorithm, device, updates)
    trainer = Trainer(
        cfg,
        Roles(
            LocalGroup(actor),
            _reference(cfg, inputs.algorithm, device),
            _critic(cfg, inputs.algorithm, device, updates),
        ),
        source,
        RewardScorer(inputs.composer, _reward_model(cfg, device)),
        inputs.algorithm,
        InProcessPublisher(engine, actor.engine.shards),
    )
    return trainer, worker


def _reward_model(cfg: RunConfig, device: str) -> RewardModel | None:
    if cfg.reward.model_path is None:
        return None
    return load_reward_model(cfg.reward.model_path, cfg.model, device, cfg.reward.max_length)


def _reference(cfg: RunConfig, algorithm: Algorithm, device: str) -> LocalGroup | None:
    if "ref_logprobs" not in algorithm.needs:
        return None
    return LocalGroup(ReferenceWorker(load_policy(cfg.ref.path or cfg.actor.path, cfg.model, device), cfg, device))


def _critic(cfg: RunConfig, algorithm: Algorithm, device: str, total_steps: int) -> LocalGroup | None:
    if "values" not in algorithm.needs:
        return None
    model = load_value_model(
        cfg.critic.path or cfg.actor.path, cfg.model, device, derive_seed(cfg.trainer.seed, "critic")
    )
    return LocalGroup(CriticWorker(model, cfg, device, total_steps))
