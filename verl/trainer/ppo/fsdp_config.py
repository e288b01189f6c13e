"""What `FSDPPPOTrainer` takes as fsdp_config, and which values of the configuration it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import field_validator

from verl.config import Section
from verl.config.loader import Tree, check, nest, overlay
from verl.core.errors import ConfigError

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}


class MixedPrecision(Section, strict=True):
    """Dtypes."""

    param_dtype: Literal["bf16", "bfloat16", "fp32", "float32"] | None = None
    """Of weights in forward, backward and generation; masters are fp32 whatever it is. null: model.dtype."""
    reduce_dtype: str = "fp32"
    """Of the sum of gradients over ranks: fp32."""

    @field_validator("param_dtype", "reduce_dtype", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

    @field_validator("param_dtype", mode="before")
    @classmethod
    def _no_half(cls, value: Any) -> Any:
        if value in ("fp16", "float16", "half"):
            raise ValueError("fp16 needs its losses scaled, which verl does not do; set bf16, or fp32")
        return value

    @field_validator("reduce_dtype")
    @classmethod
    def _whole_sums(cls, value: str) -> str:
        if value not in ("fp32", "float32"):
            raise ValueError(
                "gradients are summed in fp32 whatever param_dtype is, so that the number of ranks changes no gradient "
                "beyond rounding of fp32; set fp32, or leave it out"
            )
        return value


class FSDPConfig(Section, strict=True):
    """How actor and critic are sharded. What is left out stays as the configuration says."""

    fsdp_size: int = -1
    """Neighbours that share one copy of weights, gradients and optimizer; -1: all data parallel processes."""
    param_offload: bool | None = None
    """Keep weights between uses, gradients and optimizer on the host (update.cpu_offload)."""
    optimizer_offload: bool | None = None
    """The same switch as param_offload."""
    mixed_precision: MixedPrecision = MixedPrecision()
    """Dtypes."""

    @field_validator("fsdp_size")
    @classmethod
    def _a_size(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("a number of processes is 1 or more; -1 takes all of them")
        return value

    @classmethod
    def of(cls, given: Mapping[str, Any] | FSDPConfig | None) -> FSDPConfig:
        """Checked; a ConfigError starts with the path at fault."""
        if given is not None and not isinstance(given, (Mapping, FSDPConfig)):
            raise ConfigError(f"fsdp_config: expected a dict such as {{'fsdp_size': -1}}, found {given!r:.60}")
        made: FSDPConfig = given if isinstance(given, FSDPConfig) else check(cls, dict(given or {}), "fsdp_config")
        if None not in (both := (made.param_offload, made.optimizer_offload)) and both[0] != both[1]:
            raise ConfigError(
                f"fsdp_config.optimizer_offload: {made.optimizer_offload} beside "
                f"param_offload={made.param_offload}: weights, gradients and optimizer are on the host together or not "
                "at all; set both alike, or leave one out"
            )
        return made

    @property
    def offload(self) -> bool | None:
        return self.optimizer_offload if self.param_offload is None else self.param_offload

    @property
    def dtype(self) -> str | None:
        """As model.dtype writes it."""
        given = self.mixed_precision.param_dtype
        return None if given is None else DTYPES[given]

    def tree(self) -> Tree:
        """The values of the configuration that were chosen here."""
        out: Tree = nest("parallel.fsdp", self.fsdp_size) if "fsdp_size" in self.model_fields_set else {}
        if self.offload is not None:
            out = overlay(out, nest("update.cpu_offload", self.offload))
        if self.dtype is not None:
            out = overlay(out, nest("model.dtype", self.dtype))
        return out
