"""From a checked config to a trainer: data and rewards first, so that bad input fails before any model loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.algos.algorithm import Algorithm
from verl.checkpoint.store import CheckpointStore
from verl.config.run import RunConfig
from verl.core.protocols import RewardFn
from verl.data.load import PromptData, load_prompts
from verl.data.sampler import PromptSampler
from verl.engines import rollout
from verl.models.source import ModelSource, resolve
from verl.rewards.build import build_rewards, early_parts
from verl.rewards.composer import RewardComposer
from verl.rewards.functions import RewardFunction
from verl.trainer.checks import (
    check_compile,
    check_filter,
    check_models,
    check_outputs,
    check_rollout_memory,
    check_training_law,
)
from verl.trainer.collect import Collector
from verl.trainer.device import pick_device
from verl.trainer.evaluate import Evaluator, evaluation_params
from verl.trainer.folder import RunFolder
from verl.trainer.log import LogHook
from verl.trainer.loop import Trainer
from verl.trainer.memory import with_fsdp
from verl.trainer.parallel_checks import check_cuts, check_parallel
from verl.trainer.resume import CheckpointHook, identity
from verl.trainer.reward import RewardScorer
from verl.trainer.roles import Placed, embedded
from verl.trainer.source import OnDemandSource, steps_per_episode
from verl.trainer.trim import TrimHook
from verl.utils.console import RunConsole
from verl.utils.heap import settle
from verl.utils.tracking.tracker import Tracker
from verl.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Inputs:
    """All that is checked before a model loads. cfg: with what it left to decide; said: what was decided, for the
    log.
    """

    cfg: RunConfig
    said: str
    algorithm: Algorithm
    source: ModelSource
    tokenizer: Any
    data: PromptData
    sampler: PromptSampler
    composer: RewardComposer


@dataclass(frozen=True)
class Run:
    """A trainer with what belongs to its folder. close: ends the processes of its workers, where it has any."""

    trainer: Trainer
    folder: RunFolder
    tracker: Tracker
    close: Callable[[], None]


def read_inputs(cfg: RunConfig, functions: Sequence[tuple[RewardFn, float]] = ()) -> Inputs:
    """Everything that can fail without a model."""
    check_training_law(cfg)
    check_compile(cfg, pick_device(cfg))
    check_outputs(cfg)
    rollout.check(cfg.rollout, cfg.model.implementation)
    evaluation_params(cfg)
    algorithm = Algorithm(cfg)
    source = resolve(cfg.actor.path, cfg.model.trust_remote_code)
    tokenizer = source.tokenizer()
    data = load_prompts(cfg.data, tokenizer, cfg.trainer.seed)
    check_models(cfg, algorithm, source, data)
    check_rollout_memory(cfg, source, data, pick_device(cfg))
    sampler = PromptSampler(len(data.train), cfg.trainer.prompts_per_step, cfg.trainer.seed, cfg.data.shuffle)
    own = [RewardFunction.of(fn, weight) for fn, weight in functions]
    composer = build_rewards(cfg.reward, [*data.train, *data.eval], own)
    check_filter(cfg, composer.names)
    cfg, said = with_fsdp(cfg, algorithm, data.longest + cfg.rollout.max_response_tokens)
    check_parallel(cfg, algorithm, pick_device(cfg))
    check_cuts(cfg, algorithm)
    return Inputs(cfg, said, algorithm, source, tokenizer, data, sampler, composer)


def build(cfg: RunConfig, console: RunConsole, functions: Sequence[tuple[RewardFn, float]] = ()) -> Run:
    """The trainer of a run, restored from its checkpoint where cfg.trainer.resume asks for it.

    The output folder is left as it was until everything that may fail has been read, loaded and accepted.
    """
    if pick_device(cfg) == "cpu":
        settle()
    inputs = read_inputs(cfg, functions)
    cfg = inputs.cfg
    folder = RunFolder(cfg.trainer.output_dir)
    if not cfg.trainer.resume:
        folder.check()
    for line in inputs.data.report.lines():
        console.info(line)
    if inputs.said:
        console.info(inputs.said)
    placed = _placed(cfg, inputs)
    try:
        return _run(cfg, inputs, placed, folder, console)
    except BaseException:
        placed.close()
        raise


def _run(cfg: RunConfig, inputs: Inputs, placed: Placed, folder: RunFolder, console: RunConsole) -> Run:
    """The loop over the roles, restored, with its hooks."""
    trainer, worker = _trainer(cfg, inputs, placed, console)
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
    if pick_device(cfg) == "cpu":
        trainer.hooks.append(TrimHook())
    return Run(trainer, folder, tracker, placed.close)


def _placed(cfg: RunConfig, inputs: Inputs) -> Placed:
    """The models in their roles, in this process or on Ray."""
    steps = cfg.trainer.num_episodes * steps_per_episode(cfg, inputs.sampler)
    updates = steps * cfg.update.epochs * cfg.update.mini_batches
    if cfg.parallel.executor == "ray":
        from verl.trainer.ray_roles import on_ray

        return on_ray(cfg, inputs.algorithm, pick_device(cfg), updates)
    return embedded(cfg, inputs.algorithm, pick_device(cfg), updates)


def _trainer(cfg: RunConfig, inputs: Inputs, placed: Placed, console: RunConsole) -> tuple[Trainer, RolloutWorker]:
    """The loop over the roles."""
    device, (implementation, generation) = pick_device(cfg), placed.said
    console.info(inputs.algorithm.described)
    where = f"on {device}" + (f", {cfg.parallel.nproc} processes on Ray" * (cfg.parallel.executor == "ray"))
    console.info(f"Actor {cfg.actor.path}: {implementation}, {cfg.model.dtype} {where}")
    if cfg.update.cpu_offload and device == "cpu":
        console.info("update.cpu_offload: the models are on the host already, so it changes nothing on a CPU")
    console.info(f"Rollout {cfg.rollout.backend}: {generation}")
    worker = RolloutWorker(placed.engine, inputs.tokenizer, cfg.trainer.seed)
    needs = inputs.algorithm.needs
    source = OnDemandSource(inputs.data.train, inputs.sampler, worker, cfg, greedy="greedy_reward" in needs)
    rewards = RewardScorer(inputs.composer, placed.judge, early_parts(cfg.reward.stream, inputs.composer))
    collector = Collector(cfg, source, rewards, needs, console.warn, placed.roles.asks())
    return Trainer(cfg, placed.roles, collector, inputs.algorithm, placed.publisher), worker
