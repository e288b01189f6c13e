"""Shapes of known models, and problems made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl.models.config import DecoderConfig
from verl.models.rope import RopeConfig
from verl.planning.hardware import Hardware
from verl.planning.shape import Role
from verl.planning.space import Problem
from verl.planning.workload import Workload


def shape(layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int) -> DecoderConfig:
    return DecoderConfig(
        "llama", vocab, hidden, inner, layers, heads, kv, hidden // heads, 1e-5, False, False, False, False, False,
        (None,) * layers, RopeConfig("default", 1e4, hidden // heads, 8192), 8192,
    )  # fmt: skip


SMALL = shape(layers=4, hidden=64, inner=96, heads=4, kv=2, vocab=100)
B7 = shape(layers=32, hidden=4096, inner=11008, heads=32, kv=32, vocab=32000)
B70 = shape(layers=80, hidden=8192, inner=28672, heads=64, kv=8, vocab=128256)
STEP = Workload(prompts=128, samples=8, prompt_tokens=1024, response_tokens=1024, mini_batches=4, recompute=True)


def roles(of: DecoderConfig, names: str = "actor ref critic") -> tuple[Role, ...]:
    made = {
        "actor": Role("actor", of, 2, trains=True),
        "ref": Role("ref", of, 2),
        "critic": Role("critic", of, 2, head=False, trains=True),
    }
    return tuple(made[name] for name in names.split())


def problem(of: DecoderConfig, gpus: int, names: str = "actor ref critic", **hardware: Any) -> Problem:
    return Problem(Hardware(gpus, **hardware), STEP, roles(of, names))


def tight(gpus: int, memory_mb: float, names: str = "actor ref critic", **work: Any) -> Problem:
    """SMALL on GPUs so small and slow that memory and every rate count."""
    hw = Hardware(
        gpus, gpus_per_node=2, gpu_memory_gb=memory_mb / 1e3, tflops=0.01, hbm_gbps=1, link_gbps=1, network_gbps=0.1
    )
    step = Workload(prompts=8, samples=4, prompt_tokens=16, response_tokens=16, micro_tokens=64, mini_batches=2)
    return Problem(hw, replace(step, **work), roles(SMALL, names))
