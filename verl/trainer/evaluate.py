"""Validation on held-out prompts, with its own sampling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.algos.pass_at_k import pass_at_k
from verl.config.run import RunConfig
from verl.core.errors import ConfigError
from verl.core.generation import SamplingParams
from verl.core.metrics import Metrics
from verl.core.prompt import Prompt
from verl.core.trajectory import Trajectory
from verl.rewards.composer import VERIFIER, Rewards
from verl.trainer.folder import RunFolder
from verl.trainer.reward import RewardScorer, reward_metrics
from verl.utils.console import RunConsole
from verl.workers.rollout import RolloutWorker


def evaluation_params(cfg: RunConfig) -> SamplingParams:
    """The law of evaluation samples."""
    s = cfg.eval.sampling
    longest = cfg.eval.max_response_tokens or cfg.rollout.max_response_tokens
    if s.min_tokens > longest:
        raise ConfigError(
            f"eval.sampling.min_tokens: {s.min_tokens} is more than the {longest} tokens of the longest response "
            "(eval.max_response_tokens, else rollout.max_response_tokens)"
        )
    return SamplingParams(s.temperature, s.top_p, s.top_k, longest, s.min_tokens)


def pass_metrics(correct: np.ndarray, n: int) -> Metrics:
    """`eval/pass@k` for k = 1, 2, 4 ... below n and n itself: the mean over prompts of the chance that k of a prompt's
    n samples hold a correct one. correct [P]: samples of each prompt that passed. Nothing where n is 1.
    """
    out = Metrics()
    if n == 1:
        return out
    for k in sorted({n, *(2**i for i in range(n.bit_length()))}):
        out.mean(f"eval/pass@{k}", float(pass_at_k(n, correct, k).sum()), float(len(correct)))
    return out


class Evaluator:
    """Samples the held-out prompts before the first step, every cfg.eval.every steps, and after the last."""

    def __init__(
        self,
        cfg: RunConfig,
        prompts: Sequence[Prompt],
        worker: RolloutWorker,
        reward: RewardScorer,
        folder: RunFolder,
        console: RunConsole,
    ):
        self.cfg, self.prompts, self.worker, self.reward = cfg, prompts, worker, reward
        self.folder, self.console = folder, console

    def due(self, step: int, planned: int) -> bool:
        return step in (0, planned) or (self.cfg.eval.every > 0 and step % self.cfg.eval.every == 0)

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics under `eval/`; the first samples with their reward parts go to samples/step-N.jsonl."""
        self.console.phase("evaluate")
        trajectories = self.worker.sample(self.prompts, self.cfg.eval.n, evaluation_params(self.cfg), "eval", 0)
        rewards = self.reward.score(trajectories)
        metrics = reward_metrics(rewards, trajectories, prefix="eval/")
        verdicts = rewards.parts.get(VERIFIER)
        if verdicts is not None:
            passed = np.asarray(verdicts) >= 1.0
            metrics.mean("eval/accuracy", float(passed.sum()), float(len(passed)))
            n = self.cfg.eval.n
            metrics = Metrics.merge([metrics, pass_metrics(passed.reshape(-1, n).sum(1), n)])
        values = metrics.values_by_name()
        self._write_samples(step, trajectories, rewards)
        self.console.evaluation(step, values.get("eval/accuracy"), values["eval/reward"], len(self.prompts))
        return values

    def _write_samples(self, step: int, trajectories: Sequence[Trajectory], rewards: Rewards) -> None:
        self.folder.samples.mkdir(exist_ok=True)
        with (self.folder.samples / f"step-{step:06d}.jsonl").open("w", encoding="utf-8") as f:
            for i, t in enumerate(trajectories[: self.cfg.eval.keep_samples]):
                row: dict[str, Any] = {"step": step, "prompt_id": t.prompt.id, "prompt": t.prompt.text}
                row |= {"response": t.response_text, "reward": rewards.total[i], "finish": t.finish}
                row["parts"] = {name: values[i] for name, values in rewards.parts.items()}
                f.write(json.dumps(row, ensure_ascii=False) + "\n")
