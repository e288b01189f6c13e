"""What can be known to fail before a model loads. Each error names the value to change."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from verl.algos.algorithm import Algorithm
from verl.config.run import RunConfig
from verl.core.errors import ConfigError, DataError, ModelError
from verl.core.registry import suggestion
from verl.data.load import PromptData
from verl.engines.rollout.memory import Grant, token_bytes
from verl.models.compiler import choose, compiler
from verl.models.config import DecoderConfig
from verl.models.kernels import unfit
from verl.models.load import check_head, check_reward_model, check_role
from verl.models.source import ModelSource
from verl.rewards.composer import OVERLONG, VERIFIER
from verl.utils.monitoring import memory_total
from verl.utils.tracking.tracker import check_installed, check_sinks


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
    if cfg.model.fp32_head and cfg.rollout.backend != "native":
        raise ConfigError(
            f"model.fp32_head: native models only, and rollout.backend={cfg.rollout.backend} would sample from other "
            "logits than the trainer's; set model.fp32_head=false, or rollout.backend=native"
        )


def check_compile(cfg: RunConfig, device: str) -> None:
    """compile=on can be, as far as the config and this machine's programs tell."""
    dtype = getattr(torch, cfg.model.dtype)
    no_kernels = "the kernels are for native models" if cfg.model.implementation == "transformers" else None
    choose(cfg.model.compile, "model.compile", no_kernels or unfit(dtype, device), compiler)
    choose(cfg.rollout.compile, "rollout.compile", unfit(dtype, device), compiler)


def check_filter(cfg: RunConfig, parts: Sequence[str]) -> None:
    """What the filter compares exists, and what it is told acts. parts: names of the reward's parts."""
    f = cfg.algorithm.filter
    known = ["score", *parts, *([OVERLONG] if cfg.reward.overlong.buffer > 0 else [])]
    if f.metric not in known:
        raise ConfigError(
            f"algorithm.filter.metric: no part of the reward is called {f.metric!r}{suggestion(f.metric, known)}; "
            f"set one of {', '.join(known)}"
        )
    if f.when_short == "stop" and f.constant_groups != "resample":
        raise ConfigError(
            "algorithm.filter.when_short: stop acts where resampling came short, and "
            f"algorithm.filter.constant_groups={f.constant_groups} never samples more; set when_short=continue, "
            "or constant_groups=resample"
        )
    if f.retire_pass_rate is not None and VERIFIER not in parts:
        raise ConfigError(
            "algorithm.filter.retire_pass_rate: no verifier says which samples pass; force one with "
            "reward.verifier=NAME, or set it to null"
        )


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
    check_head("actor.path", cfg.actor.path, cfg.model)
    if "ref_logprobs" in algorithm.needs and cfg.ref.path is not None:
        check_head("ref.path", cfg.ref.path, cfg.model)
    whole = min(longest + cfg.rollout.max_response_tokens, context or longest + cfg.rollout.max_response_tokens)
    if "ref_logprobs" in algorithm.needs and cfg.ref.path is not None:
        check_role("ref.path", cfg.ref.path, cfg.model, largest, whole)
    if "values" in algorithm.needs and cfg.critic.path is not None:
        check_role("critic.path", cfg.critic.path, cfg.model, largest, whole)
    if cfg.reward.model_path is not None:
        check_reward_model(cfg.reward.model_path, cfg.model)


def check_rollout_memory(cfg: RunConfig, source: ModelSource, data: PromptData, device: str) -> None:
    """What the native engine would refuse once the model is loaded, or at the first prompt that is too long for it."""
    if cfg.rollout.backend != "native":
        return
    try:
        shape = DecoderConfig.from_hf(source.hf_config())
    except ModelError:  # not native: `rollout.attach` says so
        return
    train, held_out = (max((len(p.token_ids) for p in prompts), default=0) for prompts in (data.train, data.eval))
    response = cfg.rollout.max_response_tokens
    longest = max(train + response, held_out + (cfg.eval.max_response_tokens or response) if held_out else 0)
    per_token = token_bytes(shape, 2 if cfg.model.dtype == "bfloat16" else 4)
    grant = Grant(cfg.rollout.kv_cache_gb, cfg.rollout.prefix_cache_gb)
    grant.check(per_token, memory_total(device), min(longest, shape.max_positions))
