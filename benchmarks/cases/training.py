"""The sides of a training step: verl's embedded trainer and TRL's GRPOTrainer, on the same prompts and loss."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from cases.questions import TOPICS, questions
from cases.rewards import verl_vowels
from common import ROOT
from peers.wire import Peer
from verl.algos.presets import preset_values
from verl.config import read_yaml, resolve
from verl.config.loader import Tree, overlay
from verl.core.prompt import Prompt
from verl.trainer.build import build
from verl.trainer.log import LogHook
from verl.utils.console import RunConsole

QUICKSTART = ROOT / "examples" / "ppo" / "quickstart.yaml"
Chat = list[dict[str, str]]

SAME_LOSS: Tree = {
    "algorithm": {"name": "grpo", "aggregation": "token_mean", "kl": {"place": "off", "coef": 0.0}},
    "actor": {"optim": {"schedule": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0}},
}
"""What makes verl's GRPO the loss that the peer has (peers/trl_side.py). It adds 1e-4 to a deviation, verl 1e-6."""


@dataclass(frozen=True)
class Stepped:
    """One training step: seconds, response lengths, mean reward; of verl also seconds by phase, CPU seconds and the
    share of the step in which no model worked.
    """

    seconds: float
    lengths: list[int]
    reward: float
    phases: dict[str, float]
    cpu: float = 0.0
    idle: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def sized_chats(count: int, tokens: int, tokenizer: Any) -> list[Chat]:
    """Chats of exactly `tokens` tokens through the model's template: a question, and one more word until it fits."""
    return [
        _sized(f"Tell me about {TOPICS[i % len(TOPICS)]}", i // len(TOPICS), tokens, tokenizer) for i in range(count)
    ]


def _sized(text: str, number: int, tokens: int, tokenizer: Any) -> Chat:
    text += f" {number}" if number else ""
    for _ in range(tokens):
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        length = len(tokenizer(rendered, add_special_tokens=False).input_ids)
        if length == tokens:
            return chat
        text += " please"
    raise SystemExit(f"error: no prompt of {tokens} tokens: the template alone takes more; raise --prompt_tokens")


def ragged_chats(count: int) -> list[Chat]:
    """Questions whose answers differ in length."""
    return [[{"role": "user", "content": q}] for q in questions(count)]


def chat_rows(chats: Sequence[Chat], file: Path) -> Tree:
    """The section `data` (and no verifier) for these chats, written to `file` and taken in their order."""
    file.write_text("".join(json.dumps({"prompt": c}) + "\n" for c in chats), encoding="utf-8")
    return {"data": {"dataset": str(file), "eval_size": 0, "shuffle": False}, "reward": {"verifier": "off"}}


class VerlSide:
    """The embedded trainer of a config; each call is one step. least: no end token before this many tokens."""

    def __init__(self, layers: Sequence[Tree], folder: str, least: int = 0, vowels: bool = True):
        quiet: Tree = {"trainer": {"output_dir": folder, "sinks": [], "log_every": 10**6}}
        cfg = resolve([*layers, quiet], preset_values())
        run = build(cfg, RunConsole(stream=sys.stderr), [(verl_vowels, 1.0)] if vowels else [])
        self.trainer = run.trainer
        log = next(h for h in run.trainer.hooks if isinstance(h, LogHook))
        self.evaluator = log.evaluator
        self.trainer.hooks = ()
        # Training refuses a minimum length, whose law is not the trainer's; here it only makes both sides' work alike.
        self.trainer.source.params = replace(self.trainer.source.params, min_tokens=least)
        self._process = psutil.Process()

    def __call__(self, turn: int) -> Stepped:
        cpu, start = self._cpu(), time.perf_counter()
        result = self.trainer.train_step()
        seconds, cpu = time.perf_counter() - start, self._cpu() - cpu
        phases = {k.removeprefix("time/"): v for k, v in result.metrics.items() if k.startswith("time/")}
        lengths = [t.response_length for t in result.trajectories]
        return Stepped(seconds, lengths, result.metrics["reward"], phases, cpu, result.metrics["perf/idle"])

    def accuracy(self) -> float:
        """Greedy accuracy on the evaluation prompts."""
        assert self.evaluator is not None
        return self.evaluator.evaluate(self.trainer.step)["eval/accuracy"]

    def prompts(self, steps: int) -> list[Prompt]:
        """Those of steps 1 to `steps`, in order."""
        source = self.trainer.source
        return [source.prompts[i] for step in range(1, steps + 1) for i in source.planned(step)]

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True)
class PeerTask:
    """What TRL's side is given. answers: '' scores by vowels; micro_batch: sequences in one forward."""

    prompts: list[Chat]
    answers: list[str]
    prompts_per_step: int
    samples: int
    least: int
    most: int
    micro_batch: int
    dtype: str
    lr: float
    seed: int = 0


class TRLSide:
    """TRL's trainer in a child process; each call is one step."""

    def __init__(self, python: str, folder: str, task: PeerTask):
        self.peer = Peer("peers.trl_side", python, torch.get_num_threads())
        said = self.peer.ask(model=folder, **task.__dict__)
        self.versions = {k: str(v) for k, v in said.items()}
        self.peak = 0.0

    def __call__(self, turn: int) -> Stepped:
        said = self.peer.ask(do="step")
        self.peak = said["peak"]
        return Stepped(said["seconds"], said["lengths"], said["reward"], {})

    def accuracy(self, prompts: Sequence[Prompt]) -> float:
        """Greedy accuracy on these prompts."""
        chats, answers = [chat_of(p) for p in prompts], [answer_of(p) for p in prompts]
        return float(self.peer.ask(do="evaluate", prompts=chats, answers=answers)["accuracy"])


def chat_of(prompt: Prompt) -> Chat:
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in prompt.messages]


def answer_of(prompt: Prompt) -> str:
    """The text that `exact` compares with."""
    return str(getattr(prompt.reference, "answer", prompt.reference))


def quickstart(*layers: Tree) -> list[Tree]:
    """The quickstart's config with changes on top."""
    out: Tree = read_yaml(QUICKSTART)
    for layer in layers:
        out = overlay(out, layer)
    return [out]
