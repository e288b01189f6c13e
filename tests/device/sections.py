"""The sections of measure.py: each returns what it saw as a flat mapping."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.config import resolve
from verl.core import Completion, Prompt, SamplingParams
from verl.core.batch import Batch
from verl.core.trajectory import Trajectory
from verl.engines import rollout
from verl.engines.rollout.base import Engine
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput
from verl.utils.flops import matmul_peak, mfu
from verl.utils.monitoring import peak_memory, reset_peak_memory
from verl.weights.publisher import InProcessPublisher
from verl.workers.actor import ActorWorker
from verl.workers.update_plan import UpdatePlan

TEMPERATURE = 0.8
_EOS = (2,)
UPDATES: dict[str, dict[str, Any]] = {
    "shared prompts": {},
    "prompts apart": {"share_prompt": False},
    "recomputed": {"activation_checkpointing": True},
}
FP32_MAX = 1e-4
BF16_OVER = 1.5
"""bf16 kernels round differently, more so after prompts of random tokens: the sampler may be this much further from the
trainer than transformers is, in the mean."""


@dataclass(frozen=True)
class Work:
    """sequences: sizes of rollouts, of `tokens` each; prompts x samples of prompt + response tokens: an update; runs:
    timed ones."""

    sequences: tuple[int, ...]
    tokens: int
    prompts: int
    samples: int
    prompt: int
    response: int
    runs: int


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], runs: int) -> float:
    """Median of `runs`, after one that is not counted."""
    times = []
    for _ in range(runs + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def copy_speed(device: str) -> float:
    """Bytes read and written each second by a copy within the device's memory."""
    source = torch.ones(2**30 if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), 5)


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Random ones, each a token shorter than the one before, by turns of 8: ragged."""
    ids = torch.randint(3, vocab, (count, length), generator=torch.Generator().manual_seed(0))
    return [row[: length - i % 8].tolist() for i, row in enumerate(ids)]


def fixed(tokens: int, temperature: float = TEMPERATURE) -> SamplingParams:
    """Exactly this many tokens."""
    return SamplingParams(temperature, max_tokens=tokens, min_tokens=tokens, seed=1)


def batch_of(asked: Sequence[Sequence[int]], answers: Sequence[Completion], n: int) -> Batch:
    rows = []
    for i, answer in enumerate(answers):
        prompt = Prompt(str(i // n), tuple(asked[i // n]), "")
        rows.append(Trajectory.of(prompt, answer, "", i // n, i % n))
    return Batch.of(rows)


@torch.no_grad()
def parity(policy: Any, work: Work) -> dict[str, Any]:
    """|difference| of log-probs: sampler and trainer, prompts shared and apart, trainer and transformers; and whether
    greedy answers depend on what else is in the batch (fp32: they must not).
    """
    weight = next(policy.parameters())
    engine = _engine(policy)
    asked, free = prompts(8, work.prompt, policy.decoder.config.vocab_size), SamplingParams(TEMPERATURE, max_tokens=32)
    batch = batch_of(asked, engine.generate(asked, free, n=work.samples), work.samples)
    rows = batch["loss_mask"]

    def scored(share: bool) -> torch.Tensor:
        packed = PackedInput.of(batch, share, weight.device)
        return token_logprobs(policy, packed, TEMPERATURE)[0].cpu()[rows]

    shared, outside = scored(True), by_transformers(policy, batch)[rows]
    together = engine.generate(asked, fixed(16, 0.0))
    alone = [engine.generate([a], fixed(16, 0.0))[0].token_ids for a in asked]
    gaps = {"sampler": batch["rollout_logprobs"][rows], "apart": scored(False), "transformers": outside}
    out: dict[str, Any] = {}
    for name, other in gaps.items():
        gap = (shared - other).abs()
        out |= {f"{name} mean": float(gap.mean()), f"{name} max": float(gap.max())}
    out["greedy alike"] = sum(a == b.token_ids for a, b in zip(alone, together, strict=True)) / len(alone)
    if weight.dtype == torch.float32:
        ok = max(out["sampler max"], out["transformers max"]) < FP32_MAX and out["greedy alike"] == 1.0
    else:
        ok = out["sampler mean"] < BF16_OVER * out["transformers mean"]
    return out | {"ok": ok}


def by_transformers(policy: Any, batch: Batch) -> torch.Tensor:
    """[T] log-probs by transformers, a sequence at a time; 0 at first tokens."""
    module, device = _module(policy), next(policy.parameters()).device
    out = []
    for ids in batch.per_seq(batch["token_ids"]):
        logits = module(ids[None].to(device), use_cache=False).logits[0, :-1].float() / TEMPERATURE
        mine = logits.log_softmax(-1).gather(1, ids[1:, None].to(device))[:, 0]
        out.append(torch.cat([torch.zeros(1), mine.cpu()]))
    return torch.cat(out)


def _engine(policy: Any, **options: Any) -> Engine:
    return rollout.BACKENDS["native"].fn(policy, _EOS, **options)


def _module(policy: Any) -> Any:
    return rollout.BACKENDS["hf"].fn(policy, _EOS)._module


def rollout_speed(policy: Any, work: Work, count: int) -> dict[str, Any]:
    """`count` answers of exactly work.tokens tokens, sampled by the native engine and by transformers' generate.

    ms a step: native's seconds, its prefill included, by tokens of an answer. share of weight-reading floor: the time
    that it takes to read all weights once for each of these tokens, at the speed of a copy, over native's seconds.
    """
    vocab, device = policy.decoder.config.vocab_size, next(policy.parameters()).device
    asked = [p[: work.prompt - 8] for p in prompts(count, work.prompt, vocab)]
    engine = _engine(policy, max_sequences=count)
    reset_peak_memory()
    before = peak_memory()
    native = seconds(lambda: engine.generate(asked, fixed(work.tokens)), work.runs)
    peak = peak_memory()
    module, ids = _module(policy), torch.tensor(asked, device=device)
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": work.tokens, "pad_token_id": 0}
    how |= {"min_new_tokens": work.tokens, "attention_mask": torch.ones_like(ids)}
    plain = seconds(lambda: module.generate(ids, **how), work.runs)
    drawn = count * work.tokens
    size = sum(p.numel() * p.element_size() for p in policy.parameters())
    floor = work.tokens * size / copy_speed(device.type)
    return {
        "native tok/s": drawn / native,
        "generate tok/s": drawn / plain,
        "ratio": plain / native,
        "ms a step": 1e3 * native / work.tokens,
        "share of weight-reading floor": floor / native,
        "GB over what was held": peak - before,
    }


def update(policy: Any, work: Work, section: dict[str, Any]) -> dict[str, Any]:
    """One optimizer step of GRPO on work.prompts x work.samples random answers; section: of the config's `update`.

    seconds: of the whole step. tokens: what went through the layers. tok/s: of all sequences, prompts counted in each.
    share of matrix peak: of the measured one, by the operations that were computed. The step changes the policy's
    weights, so measure nothing with it afterwards.
    """
    weight = next(policy.parameters())
    tree = {"algorithm": {"name": "grpo", "kl": {"coef": 0}}, "update": {"micro_batch_tokens": 16384, **section}}
    cfg = resolve([tree, {"actor": {"optim": {"lr": 1e-9}}, "rollout": {"n": work.samples}}], preset_values())
    actor = ActorWorker(policy, cfg, Algorithm(cfg), weight.device.type, 100)
    asked = [p[: work.prompt - 8] for p in prompts(work.prompts, work.prompt, policy.decoder.config.vocab_size)]
    draws = torch.randint(3, policy.decoder.config.vocab_size, (work.prompts * work.samples, work.response))
    size = work.response
    answers = [Completion("", tuple(r), (-1.0,) * size, "length", (0,) * size) for r in draws.tolist()]
    batch = batch_of(asked, answers, work.samples)
    batch = batch.with_(advantages=torch.randn(batch.num_tokens))
    plan = UpdatePlan.of(batch, cfg.update, 0, 1)
    seen: dict[str, float] = {}
    reset_peak_memory()
    spent = seconds(lambda: seen.update(actor.update_actor(batch, plan=plan).values_by_name()), work.runs)
    peak = matmul_peak(weight.device.type, "bfloat16")
    out = {"seconds": spent, "tokens": seen["actor/tokens"], "tok/s": batch.num_tokens / spent}
    out |= {"share of matrix peak": mfu(seen["actor/flops"], spent, peak), "peak GB": peak_memory()}
    return out


def publish(policy: Any) -> dict[str, Any]:
    """Publishing weights in place: microseconds of one call, GB that memory rose by at its peak, and the engine's last
    version (5 timed calls and one before: 6).
    """
    engine = _engine(policy)
    shards = dict(policy.named_parameters())
    publisher = InProcessPublisher(engine, lambda: shards)
    reset_peak_memory()
    before = peak_memory()
    spent = seconds(lambda: publisher.publish(engine.version + 1), 5)
    return {"microseconds": 1e6 * spent, "GB more": peak_memory() - before, "versions": engine.version}
