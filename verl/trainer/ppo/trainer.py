"""`FSDPPPOTrainer`: a run from Python, with models as paths or as loaded modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from verl.algos.presets import preset_values
from verl.config import RunConfig, read_yaml, resolve
from verl.config.loader import Tree, nest, overlay
from verl.config.names import NAMES
from verl.core.errors import ConfigError
from verl.core.registry import suggestion
from verl.rewards.functions import RewardFunction
from verl.trainer.device import pick_device
from verl.trainer.ppo.fsdp_config import FSDPConfig
from verl.trainer.ppo.inputs import Inputs, check_module, tokenizer_of
from verl.trainer.run import RunResult, run

Model = str | os.PathLike[str] | nn.Module
"""A path as in actor.path, or a transformers module that is already loaded."""
ROLES = {
    "actor_model": "actor.path",
    "reward_model": "reward.model_path",
    "ref_model": "ref.path",
    "critic_model": "critic.path",
}
"""Argument to path; the roles that need a tokenizer first."""
OWN = {path: name for name, path in ROLES.items()} | {
    "trainer.output_dir": "output_dir",
    "parallel.nproc": "nproc",
}
"""Paths that have arguments of their own."""


class FSDPPPOTrainer:
    """PPO (or another algorithm) with models sharded over all processes, and rewards of the caller's.

    actor_model, ref_model, reward_model, critic_model: a path, a hub id, or a loaded transformers module, which is
    copied to files for the run and stays as it is; None: as the configuration says.
    tokenizer: of a loaded actor_model; None: the one where the module was loaded from.
    fsdp_config: `{"fsdp_size", "param_offload", "optimizer_offload", "mixed_precision"}`, see `FSDPConfig`.
    config: what everything else is: a RunConfig, a YAML file, a tree as in one; None: the defaults.
    output_dir: the folder of the run. nproc: processes; None: as config says, else one for each GPU, on a CPU one.
    overrides: the flags of examples/ppo/quickstart.py (learning_rate, kl_coef, num_episodes, algorithm, ...).

    Where arguments contradict the configuration, the arguments hold. Raises ConfigError or ModelError that names the
    argument at fault. `config` is what is set so far; a loaded model stands there by its name.
    """

    def __init__(
        self,
        actor_model: Model | None = None,
        ref_model: Model | None = None,
        reward_model: Model | None = None,
        critic_model: Model | None = None,
        *,
        tokenizer: Any = None,
        fsdp_config: Mapping[str, Any] | FSDPConfig | None = None,
        config: RunConfig | str | os.PathLike[str] | Mapping[str, Any] | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        nproc: int | None = None,
        **overrides: Any,
    ):
        if actor_model is None and config is None:
            raise ConfigError("actor_model: give a path or a loaded model, or a config with actor.path")
        given = {
            "actor_model": actor_model,
            "reward_model": reward_model,
            "ref_model": ref_model,
            "critic_model": critic_model,
        }
        self._models = {name: model for name, model in given.items() if model is not None}
        self._tokenizer = tokenizer
        self._functions: list[RewardFunction] = []
        sharding = FSDPConfig.of(fsdp_config)
        _check_overrides(overrides, sharding, config)
        named = overrides if output_dir is None else {"output_dir": output_dir, **overrides}
        self._tree = _overlay_named(overlay(_tree(config), sharding.tree()), named)
        if nproc is not None:
            self._tree = overlay(self._tree, nest("parallel.nproc", nproc))
        names = {name: _shown(name, model) for name, model in self._models.items()}
        self._check_tokenizer()
        self._tree = overlay(self._tree, self._processes(self._resolve(names), isinstance(config, RunConfig), nproc))
        self.config = self._resolve(names)
        _check_fsdp_size(self.config)

    def add_reward_fn(self, fn: Callable[[list[str], list[str]], Sequence[float]], weight: float = 1.0) -> None:
        """Add `weight * fn(prompts, responses)` to the total: reward model + verifier + sum(weight * function).

        fn: two lists of texts to one number a response. RewardError where it cannot be one.
        """
        self._functions.append(RewardFunction.of(fn, weight))

    def fit(self, dataset: Any = None) -> RunResult:
        """Train from the models' own weights, and leave the trained one in output_dir.

        dataset: a name or path as --dataset_name takes, a datasets.Dataset, a list of rows, a list of prompts; None: as
        the configuration says.
        A second `fit` is a second run: it begins with the same weights, and moves the first one's files aside, into
        `previous-N/` of the folder (overwrite=True removes them; resume=True goes on from the last checkpoint).
        """
        with Inputs(self.config.trainer.output_dir) as inputs:
            code = self.config.model.trust_remote_code
            paths = {name: self._path(inputs, name, model, code) for name, model in self._models.items()}
            chosen: Tree = {}
            if dataset is not None:
                is_name = isinstance(dataset, (str, os.PathLike))
                chosen = nest("data.dataset", os.fspath(dataset) if is_name else inputs.rows("dataset", dataset))
            cfg = self._resolve(paths, chosen)
            return run(cfg, [(f.fn, f.weight) for f in self._functions])

    def _path(self, inputs: Inputs, name: str, model: Model, code: bool) -> str:
        """Where the model of a role is for this run."""
        if not isinstance(model, nn.Module):
            return os.fspath(model)
        tokenizer = self._tokenizer if name == "actor_model" else None
        if tokenizer is None and name in ("actor_model", "reward_model"):
            tokenizer = tokenizer_of(name, model, code)
        return inputs.model(name, model, tokenizer)

    def _resolve(self, paths: Mapping[str, str], more: Tree | None = None) -> RunConfig:
        tree = self._tree
        for name, path in paths.items():
            tree = overlay(tree, nest(ROLES[name], path))
        return resolve([tree, more or {}], preset_values())

    def _processes(self, cfg: RunConfig, whole: bool, nproc: int | None) -> Tree:
        """nproc and fsdp where neither an argument nor the configuration says them. whole: it was a RunConfig."""
        section = self._tree.get("parallel", {})
        chosen: Tree = {} if "fsdp" in section else {"fsdp": -1}
        if "nproc" not in section:
            if cfg.parallel.address is not None:
                raise ConfigError(f"nproc: how many processes of the cluster at {cfg.parallel.address}?")
            chosen["nproc"] = torch.cuda.device_count() if pick_device(cfg) == "cuda" else 1
        if whole and (chosen.get("nproc") or cfg.parallel.nproc) > 1:
            chosen["executor"] = "ray"  # a whole configuration says embedded because it had one process
        return {"parallel": chosen}

    def _check_tokenizer(self) -> None:
        """One that would not be used is refused, not ignored."""
        if self._tokenizer is None:
            return
        if not isinstance(self._models.get("actor_model"), nn.Module):
            raise ConfigError("tokenizer: it goes with a loaded actor_model; a path has its tokenizer in its folder")
        if not hasattr(self._tokenizer, "save_pretrained"):
            raise ConfigError(
                f"tokenizer: expected a transformers tokenizer, found a {type(self._tokenizer).__name__}; "
                "load one with AutoTokenizer.from_pretrained"
            )


def _tree(config: RunConfig | str | os.PathLike[str] | Mapping[str, Any] | None) -> Tree:
    if isinstance(config, RunConfig):
        return config.model_dump()
    if isinstance(config, (str, os.PathLike)):
        return read_yaml(os.fspath(config))
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config: expected a RunConfig, a YAML file or a dict, found a {type(config).__name__}")
    return dict(config or {})


def _shown(name: str, model: Any) -> str:
    """What stands for a model before it has a path of its own."""
    if isinstance(model, nn.Module):
        check_module(name, model)
        return str(getattr(model, "name_or_path", "") or type(model).__name__)
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"{name}: expected a path, a hub id or a loaded model, found a {type(model).__name__}")
    return os.fspath(model)


def _check_overrides(overrides: Mapping[str, Any], sharding: FSDPConfig, config: Any) -> None:
    known = {name for name, paths in NAMES.items() if paths[0] not in OWN}
    for name in overrides:
        if name not in known:
            paths = NAMES.get(name)
            hint = f"; give {OWN[paths[0]]}=" if paths else suggestion(name, sorted({*known, *ROLES}))
            raise ConfigError(f"{name}: unknown argument{hint}; overrides: {', '.join(sorted(known))}")
    dtype = overrides.get("dtype")
    if dtype is not None and sharding.dtype not in (None, dtype):
        raise ConfigError(
            f"dtype: {dtype} contradicts fsdp_config.mixed_precision.param_dtype, which is {sharding.dtype}; keep one"
        )
    if isinstance(config, RunConfig) and overrides.get("algorithm") not in (None, config.algorithm.name):
        raise ConfigError(
            f"algorithm: a RunConfig has all the values of {config.algorithm.name} already; give config as a file or "
            "a dict, or resolve it with the other preset"
        )


def _overlay_named(tree: Tree, named: Mapping[str, Any]) -> Tree:
    """Values by their short names over a tree. A fault of one is told by its name."""
    for name, value in named.items():
        for path in NAMES[name]:
            tree = overlay(tree, nest(path, os.fspath(value) if isinstance(value, os.PathLike) else value))
    try:
        resolve([tree], preset_values())
    except ConfigError as e:
        for name in named:
            if any(str(e).startswith(f"{path}:") for path in NAMES[name]):
                raise ConfigError(f"{name}: {e}") from None
        raise
    return tree


def _check_fsdp_size(cfg: RunConfig) -> None:
    p = cfg.parallel
    copies = p.nproc // (p.tp * p.pp)
    if p.fsdp is not None and (p.fsdp > copies or (p.fsdp > 0 and copies % p.fsdp)):
        raise ConfigError(
            f"fsdp_config.fsdp_size: {p.fsdp} does not divide the {copies} data parallel processes; give -1 for all"
        )
