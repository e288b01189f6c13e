"""TRL's GRPOTrainer as a training peer. Its loop runs in this process and waits before every step for a request.

`python -m peers.trl_side`, driven by benchmarks/step.py and benchmarks/memory.py. Loss settings are those of verl's
side: token mean over the step (loss_type dapo), advantages divided by the group's deviation, no KL, one optimizer step
a rollout, constant rate, no weight decay. Gradient checkpointing is off, as it is there.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from cases.rewards import exact, vowels
from peers.wire import Line

try:
    import datasets
    import torch
    import transformers
    import trl
except ImportError as e:
    sys.exit(f'no TRL in {sys.executable} ({e}); pip install "trl==1.16.*" "transformers>=5,<6", or give --trl_python')

Chat = list[dict[str, str]]


class Turns(transformers.TrainerCallback):
    """Holds each step back until the parent asks for it, and tells how long it took."""

    def __init__(self, line: Line, lengths: list[int], rewards: list[float]):
        self.line, self.lengths, self.rewards = line, lengths, rewards
        self.trainer: Any = None
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while True:
            request = self.line.receive()
            if request is None:
                sys.exit(0)
            if request["do"] == "step":
                break
            self.line.reply(accuracy=accuracy(self.trainer, request["prompts"], request["answers"]))
        self.lengths.clear()
        self.rewards.clear()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self.started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        mean = sum(self.rewards) / len(self.rewards)
        self.line.reply(seconds=seconds, lengths=self.lengths, reward=mean, peak=peak)


def accuracy(trainer: Any, prompts: Sequence[Chat], answers: Sequence[str]) -> float:
    """Share of greedy responses that are the answer, all prompts in one batch."""
    tokenizer, model = trainer.processing_class, trainer.model
    tokenizer.padding_side = "left"
    ids = tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    model.eval()
    with torch.no_grad():
        out = model.generate(**ids, do_sample=False, max_new_tokens=trainer.args.max_completion_length)
    model.train()
    texts = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(exact(t, a) for t, a in zip(texts, answers, strict=True)) / len(answers)


def reward_of(lengths: list[int], rewards: list[float]) -> Any:
    """TRL's form of a reward function, which also notes what was sampled."""

    def score(
        completions: list[Chat], completion_ids: list[list[int]], answer: list[str], **kwargs: Any
    ) -> list[float]:
        texts = [c[0]["content"] for c in completions]
        made = [exact(t, a) if a else vowels(t) for t, a in zip(texts, answer, strict=True)]
        lengths.extend(len(ids) for ids in completion_ids)
        rewards.extend(made)
        return made

    return score


def config_of(request: dict[str, Any], folder: str) -> Any:
    """request: see cases/training.py."""
    rows, micro = request["prompts_per_step"] * request["samples"], request["micro_batch"]
    return trl.GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=request["samples"],
        max_completion_length=request["most"],
        generation_kwargs={"min_new_tokens": request["least"]} if request["least"] else None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        num_iterations=1,
        epsilon=0.2,
        learning_rate=request["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=True,
        model_init_kwargs={"dtype": request["dtype"]},
        max_steps=len(request["prompts"]) // request["prompts_per_step"],
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=10**6,
        report_to="none",
        disable_tqdm=True,
        seed=request["seed"],
    )


def main() -> None:
    """One request builds the trainer, each further one is a step or an evaluation."""
    line = Line()
    request = line.receive()
    if request is None:
        return
    lengths: list[int] = []
    rewards: list[float] = []
    turns = Turns(line, lengths, rewards)
    rows = [{"prompt": p, "answer": a} for p, a in zip(request["prompts"], request["answers"], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=request["model"],
            reward_funcs=reward_of(lengths, rewards),
            args=config_of(request, folder),
            train_dataset=datasets.Dataset.from_list(rows),
            callbacks=[turns],
        )
        turns.trainer = trainer
        line.reply(**{"trl": trl.__version__, "its transformers": transformers.__version__})
        trainer.train()


if __name__ == "__main__":
    main()
