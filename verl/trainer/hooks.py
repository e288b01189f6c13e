"""Hooks: evaluation, log lines and metrics, checkpoints. They run in this order after each step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.checkpoint.store import CheckpointStore
from verl.config.run import RunConfig
from verl.core.errors import CheckpointError, DataError
from verl.core.generation import SamplingParams
from verl.core.prompt import Prompt
from verl.core.trajectory import Trajectory
from verl.rewards.composer import Rewards
from verl.trainer.folder import RunFolder
from verl.trainer.loop import StepResult, Trainer
from verl.trainer.reward import RewardScorer, reward_metrics
from verl.utils.console import RunConsole
from verl.utils.monitoring import get_gpu_memory_usage
from verl.utils.tracking import Tracker
from verl.workers.rollout import RolloutWorker


class BaseHook:
    """Does nothing at every point; hooks override what they care about."""

    def before_run(self, trainer: Trainer) -> None:
        return None

    def on_phase(self, name: str) -> None:
        return None

    def after_step(self, trainer: Trainer, result: StepResult) -> dict[str, float]:
        return {}

    def after_run(self, trainer: Trainer) -> None:
        return None


def evaluation_params(cfg: RunConfig) -> SamplingParams:
    """The law of evaluation samples."""
    s = cfg.eval.sampling
    longest = cfg.eval.max_response_tokens or cfg.rollout.max_response_tokens
    return SamplingParams(s.temperature, s.top_p, s.top_k, longest, s.min_tokens)


class EvaluateHook(BaseHook):
    """Samples the held-out prompts every cfg.eval.every steps and after the last; the log hook asks for the one before the first."""

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

    def after_step(self, trainer: Trainer, result: StepResult) -> dict[str, float]:
        every = self.cfg.eval.every
        due = result.step == trainer.planned_steps or (every > 0 and result.step % every == 0)
        return self.evaluate(result.step) if due else {}

    def evaluate(self, step: int) -> dict[str, float]:
        self.console.phase("evaluate")
        trajectories = self.worker.sample(self.prompts, self.cfg.eval.n, evaluation_params(self.cfg), "eval", 0)
        rewards = self.reward.score(trajectories)
        metrics = reward_metrics(rewards, trajectories, prefix="eval/")
        verdicts = rewards.parts.get("verifier")
        if verdicts is not None:
            metrics.mean("eval/accuracy", float(sum(v >= 1.0 for v in verdicts)), float(len(verdicts)))
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


class LogHook(BaseHook):
    """The log lines, the progress view, and one row of metrics a step."""

    def __init__(self, cfg: RunConfig, tracker: Tracker, console: RunConsole, evaluate: EvaluateHook | None):
        self.cfg, self.tracker, self.console, self.evaluate = cfg, tracker, console, evaluate
        self.last: StepResult | None = None

    def before_run(self, trainer: Trainer) -> None:
        self.tracker.rewind(trainer.step)
        self.console.start(self.cfg.algorithm.name, self.cfg.trainer.num_episodes, trainer.planned_steps, trainer.step)
        if self.evaluate is not None and trainer.step == 0:
            self.tracker.log(self.evaluate.evaluate(0), 0)

    def on_phase(self, name: str) -> None:
        self.console.phase(name)

    def after_step(self, trainer: Trainer, result: StepResult) -> dict[str, float]:
        m = result.metrics
        if self.evaluate is not None:
            m.update(self.evaluate.after_step(trainer, result))
        m["perf/memory_gb"] = float(get_gpu_memory_usage())
        seconds = sum(v for k, v in m.items() if k.startswith("time/"))
        m["perf/throughput"] = result.batch.num_tokens / max(seconds, 1e-9)
        self.tracker.log(m, result.step)
        episode, within = trainer.source.place(result.step)
        per_episode, kl = trainer.source.steps_per_episode, m.get("kl")
        if within == 0:
            lr = m.get("actor/lr", self.cfg.actor.optim.lr)
            self.console.step_zero(episode + 1, per_episode, lr, m["reward"], kl, m["perf/memory_gb"])
        due = (within + 1) % self.cfg.trainer.log_every == 0 or within + 1 == per_episode
        self.console.step(
            episode + 1, within + 1, per_episode, m["reward"], kl, m["perf/throughput"],
            show=due and result.step < trainer.planned_steps, metrics=m,
        )  # fmt: skip
        if m.get("actor/skipped_steps", 0) + m.get("critic/skipped_steps", 0) > 0:
            self.console.warn(
                f"step {result.step}: gradients were not finite, the update was skipped; calmer values: "
                "--ppo_clip_coef 0.05 --kl_coef 0.01 --learning_rate 1e-7"
            )
        self._check_mismatch(result)
        self.last = result
        return {}

    def _check_mismatch(self, result: StepResult) -> None:
        """On the first step the sampler's law and the trainer's must be one; say so when they are not."""
        gap = result.metrics.get("rollout/logprob_gap", 0.0)
        bound = 1e-3 if self.cfg.model.dtype == "float32" else 0.05
        if self.last is None and gap > bound:
            self.console.warn(
                f"sampler and trainer disagree: mean |log-prob difference| {gap:.4f} (expected below {bound}); possible "
                "causes: other temperature, top_p or min_tokens in one of them, dropout, dtype, stale weights"
            )


class CheckpointHook(BaseHook):
    """Saves every cfg.trainer.save_every steps. `about` ties a checkpoint to its data and configuration."""

    def __init__(self, cfg: RunConfig, store: CheckpointStore, about: dict[str, Any], console: RunConsole):
        self.cfg, self.store, self.about, self.console = cfg, store, about, console

    def after_step(self, trainer: Trainer, result: StepResult) -> dict[str, float]:
        every = self.cfg.trainer.save_every
        if every > 0 and result.step % every == 0:
            self.console.phase("checkpoint")
            self.store.save(result.step, trainer.state(), self.about)
        return {}

    def resume(self, trainer: Trainer) -> None:
        """Restore the newest whole checkpoint, or say that there is none and start at step 0."""
        found = self.store.newest()
        if found is None:
            if self.store.steps():
                raise CheckpointError(
                    f"{self.store.root}: no checkpoint is whole; start afresh without --resume (the folder is kept aside)"
                )
            self.console.info(f"no checkpoint in {self.store.root} yet: starting from step 0")
            return
        step, manifest = found
        refuse_other_run(manifest, self.about, self.store.folder(step))
        trainer.load_state(self.store.load(step))
        self.console.info(f"Resuming from {self.store.folder(step)}")


MAY_CHANGE = ("num_episodes", "log_every", "save_every", "keep_checkpoints", "resume", "overwrite", "output_dir", "sinks", "run_name")


def identity(cfg: RunConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What must be the same for a run to go on: the configuration that acts on numbers, and the prompts."""
    tree = cfg.model_dump(mode="json")
    tree["trainer"] = {k: v for k, v in tree["trainer"].items() if k not in MAY_CHANGE}
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(repr((p.id, p.token_ids)).encode())
    return {"config": tree, "data": digest.hexdigest()}


def refuse_other_run(manifest: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """CheckpointError naming the first setting that differs from the one the checkpoint was made under."""
    then, here = dict(_flat(manifest["config"])), dict(_flat(now["config"]))
    for path in sorted(then.keys() | here.keys()):
        if then.get(path) != here.get(path):
            raise CheckpointError(
                f"{path}: {folder} was made with {then.get(path)!r}, this run has {here.get(path)!r}; set it back, or "
                "start another run with another --output_dir"
            )
    if manifest["data"] != now["data"]:
        raise DataError(f"data.dataset: the prompts are not those that {folder} was trained on; restore them to resume")


def _flat(tree: Any, at: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(at, tree)]
    return [pair for k, v in tree.items() for pair in _flat(v, f"{at}.{k}" if at else k)]

