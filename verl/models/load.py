"""From a path, or a loaded Hugging Face module, to a model in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.config.models import ModelConfig
from verl.core.errors import ConfigError, ModelError
from verl.models.config import NATIVE_TYPES, DecoderConfig
from verl.models.decoder import Decoder
from verl.models.fill import fill
from verl.models.hf import TransformersPolicy
from verl.models.hf_load import hf_module
from verl.models.kernels import chosen
from verl.models.policy import AnyPolicy, Policy
from verl.models.reward_model import RewardModel
from verl.models.source import LoadedSource, ModelSource, resolve
from verl.models.value import ValueModel
from verl.parallel.axes import PipelineParallel, TensorParallel

ModelPath = str | Path | nn.Module
"""A path as in `actor.path`, or a transformers module that is already loaded."""


def load_policy(
    path: ModelPath,
    cfg: ModelConfig,
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    pp: PipelineParallel | None = None,
) -> AnyPolicy:
    """The policy at `path` in cfg.dtype; its `.implementation` says what `auto` took. ModelError where it cannot be.

    tp, pp: this process gets, and reads, its share only.
    """
    source, dtype = _source(path, cfg), getattr(torch, cfg.dtype)
    config = _native_config(source, cfg)
    if config is None:
        _refuse_fp32_head(source.name, cfg)
        _refuse_kernels(source.name, cfg)
        _refuse_axes(source.name, tp, pp)
        return TransformersPolicy(hf_module(source, "AutoModelForCausalLM", dtype, device), source)
    return native_policy(source, config, cfg, device, tp, pp)


def native_policy(
    source: ModelSource,
    config: DecoderConfig,
    cfg: ModelConfig,
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    pp: PipelineParallel | None = None,
) -> Policy:
    """`load_policy` where the config is known; it imports nothing of transformers."""
    dtype = getattr(torch, cfg.dtype)
    kernels, why = chosen(cfg.compile, dtype, device)
    policy = Policy(config, source, dtype, fp32_head=cfg.fp32_head, tp=tp, pp=pp).to_empty(device=device)
    share, ignore = policy.decoder.share, r"lm_head\.weight" if config.tied else None
    fill(policy, source.tensors(share), source.name, ignore, share=share)
    policy.decoder.use(kernels, why)
    return policy


def load_value_model(
    path: ModelPath,
    cfg: ModelConfig,
    device: torch.device | str = "cpu",
    seed: int = 0,
    tp: TensorParallel | None = None,
    pp: PipelineParallel | None = None,
) -> ValueModel:
    """The critic: the body of the model at `path`; the score head of a reward model, else a head of zeros.

    seed: of body weights that a checkpoint lacks (only transformers bodies have such: poolers and the like). tp, pp: as
    in `load_policy`; the head is whole on every rank, and in the last stage only.
    """
    source, dtype = _source(path, cfg), getattr(torch, cfg.dtype)
    config = _native_config(source, cfg)
    has_head = _is_classifier(source)
    if has_head:
        _require_one_label(source)
    if config is not None:
        return _native_value(source, config, cfg, device, has_head, tp, pp)
    _refuse_axes(source.name, tp, pp)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = hf_module(source, "AutoModel", dtype, device)
    model = ValueModel(body, body.config.get_text_config().hidden_size, source, device)
    nn.init.zeros_(model.score.weight)
    if has_head:
        head = ((name.removeprefix("score."), t) for name, t in source.tensors() if name.startswith("score."))
        fill(model.score, head, source.name)
    return model


def _native_value(
    source: ModelSource,
    config: DecoderConfig,
    cfg: ModelConfig,
    device: torch.device | str,
    has_head: bool,
    tp: TensorParallel | None,
    pp: PipelineParallel | None,
) -> ValueModel:
    dtype = getattr(torch, cfg.dtype)
    # There is no output matrix, so the last stage of a pipeline needs no embedding, tied or not.
    decoder = Decoder(replace(config, tied=False), dtype, tp=tp, pp=pp)
    decoder.use(*chosen(cfg.compile, dtype, device))
    model = ValueModel(decoder, config.hidden_size, source, "meta").to_empty(device=device)
    share = decoder.share
    if decoder.stage.last:
        nn.init.zeros_(model.score.weight)
    ignore = r"lm_head\.weight|score\.bias" if not has_head else None
    optional = () if has_head else ("score.weight",)
    fill(model, source.tensors(share), source.name, ignore, optional, share)
    return model


def load_reward_model(
    path: ModelPath, cfg: ModelConfig, device: torch.device | str = "cpu", max_length: int = 4096
) -> RewardModel:
    """The sequence classification model at `path`; ModelError unless it has exactly one trained output."""
    source = _source(path, cfg)
    _require_one_label(source)
    module = hf_module(source, "AutoModelForSequenceClassification", getattr(torch, cfg.dtype), device)
    return RewardModel(module, source.tokenizer(), source, max_length)


def check_role(key: str, path: ModelPath, cfg: ModelConfig, largest: int, longest: int) -> None:
    """Refuse, from its config alone, a model that cannot read what the policy writes.

    key: where `path` was set. largest: token id of all prompts. longest: of all sequences, in tokens.
    """
    text = _source(path, cfg).hf_config().get_text_config()
    if largest >= text.vocab_size:
        raise ModelError(
            f"{key}: {path} has a vocabulary of {text.vocab_size}, but the prompts hold token id {largest}; "
            "give a model that shares the actor's tokenizer"
        )
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and context < longest:
        raise ModelError(
            f"{key}: {path} has a context of {context} tokens, the longest sequence here may have {longest}; lower "
            "data.max_prompt_tokens or rollout.max_response_tokens"
        )


def check_head(key: str, path: ModelPath, cfg: ModelConfig) -> None:
    """ConfigError where model.fp32_head is asked of a policy that transformers runs; reads its config alone."""
    if cfg.fp32_head and _native_config(_source(path, cfg), cfg) is None:
        _refuse_fp32_head(f"{key} {path}", cfg)
        _refuse_kernels(f"{key} {path}", cfg)


def _refuse_fp32_head(name: str, cfg: ModelConfig) -> None:
    if cfg.fp32_head:
        raise ConfigError(
            f"model.fp32_head: native models only, and {name} runs on transformers; set model.fp32_head=false, "
            "or model.implementation=native where the architecture is known"
        )


def _refuse_kernels(name: str, cfg: ModelConfig) -> None:
    if cfg.compile == "on":
        raise ConfigError(
            f"model.compile=on: the kernels are for native models, and {name} runs on transformers; set auto or off"
        )


def _refuse_axes(name: str, tp: TensorParallel | None, pp: PipelineParallel | None) -> None:
    for axis, key, what in ((tp, "tp", "tensor"), (pp, "pp", "pipeline")):
        if axis is not None:
            raise ConfigError(
                f"parallel.*.{key}: {what} parallelism is for native models only, and {name} runs on transformers; set "
                f"parallel.*.{key} to 1, or model.implementation=native where the architecture is known"
            )


def check_reward_model(path: ModelPath, cfg: ModelConfig) -> None:
    """ModelError unless the model at `path` is there and has one output, from its config alone."""
    _require_one_label(_source(path, cfg))


def _source(path: ModelPath, cfg: ModelConfig) -> ModelSource:
    if isinstance(path, nn.Module):
        return LoadedSource(path, cfg.trust_remote_code)
    return resolve(path, cfg.trust_remote_code)


def _native_config(source: ModelSource, cfg: ModelConfig) -> DecoderConfig | None:
    """The decoder's config, or None where transformers is to run the model."""
    if cfg.implementation == "transformers":
        return None
    hf_config = source.hf_config()
    if cfg.implementation == "native":
        return DecoderConfig.from_hf(hf_config)
    try:
        return DecoderConfig.from_hf(hf_config) if hf_config.model_type in NATIVE_TYPES else None
    except ModelError:  # a known family with a feature that only transformers computes
        return None


def _is_classifier(source: ModelSource) -> bool:
    return any("ForSequenceClassification" in name for name in source.hf_config().architectures or ())


def _require_one_label(source: ModelSource) -> None:
    config: Any = source.hf_config()
    if config.num_labels != 1:
        raise ModelError(
            f"{source.name}: a reward model needs one output, this one has {config.num_labels} labels "
            f"(architectures {config.architectures}); give a sequence classification model with num_labels=1"
        )
