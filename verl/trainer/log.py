"""What a user sees of a run: log lines, the progress view, and one row of metrics a step."""

from __future__ import annotations

from verl.config.run import RunConfig
from verl.trainer.evaluate import Evaluator
from verl.trainer.hooks import Hook
from verl.trainer.loop import StepResult, Trainer
from verl.trainer.seldom import Seldom
from verl.utils.console import RunConsole
from verl.utils.flops import matmul_peak, mfu
from verl.utils.monitoring import get_gpu_memory_usage
from verl.utils.phase_table import PhaseTable
from verl.utils.tracking import Tracker


class LogHook(Hook):
    """The log lines, the progress view, and one row of metrics a step."""

    def __init__(self, cfg: RunConfig, tracker: Tracker, console: RunConsole, evaluator: Evaluator | None, device: str):
        self.cfg, self.tracker, self.console, self.evaluator = cfg, tracker, console, evaluator
        self.device = device
        self.warn = Seldom(console.warn)
        self.first = self.slow = True
        self.cut = 0
        self.phases = PhaseTable()

    def before_run(self, trainer: Trainer) -> None:
        self.tracker.rewind(trainer.step)
        self.console.start(self.cfg.algorithm.name, self.cfg.trainer.num_episodes, trainer.planned_steps, trainer.step)
        if self.evaluator is not None and trainer.step == 0:
            self.tracker.log(self.evaluator.evaluate(0), 0)

    def on_phase(self, name: str) -> None:
        self.console.phase(name)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        m = result.metrics
        if self.evaluator is not None and self.evaluator.due(result.step, trainer.planned_steps):
            m.update(self.evaluator.evaluate(result.step))
        m["perf/memory_gb"] = float(get_gpu_memory_usage())
        seconds = sum(v for k, v in m.items() if k.startswith("time/"))
        m["perf/throughput"] = sum(len(t.token_ids) for t in result.trajectories) / max(seconds, 1e-9)
        flops = m.get("actor/flops", 0.0) + m.get("critic/flops", 0.0)
        if flops > 0:
            m["perf/mfu"] = mfu(flops, m["time/update"], matmul_peak(self.device, self.cfg.model.dtype))
        self.tracker.log(m, result.step)
        self.phases.add(m)
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
        if m.get("update/skipped", 0) > 0:
            self.warn(
                "skipped",
                result.step,
                "no sample was left to learn from, the weights stay as they are; see algorithm.filter "
                "(constant_groups, exclude_truncated) and algorithm.rollout_correction.reject, or raise rollout.n",
            )
        self._check_reward_wait(trainer, result)
        if trainer.reward.cut > self.cut:
            self.console.warn(
                f"step {result.step}: the reward model lost the beginning of {trainer.reward.cut - self.cut} texts: "
                f"longer than reward.max_length={self.cfg.reward.max_length} or its own context"
            )
            self.cut = trainer.reward.cut
        if self.first:
            self._check_mismatch(result)
            self.first = False

    def after_run(self, trainer: Trainer) -> None:
        for line in self.phases.lines():
            self.console.info(line)

    def _check_reward_wait(self, trainer: Trainer, result: StepResult) -> None:
        """Functions that the step waits for could run while it samples, where their author says so."""
        spent = {k: v for k, v in result.metrics.items() if k.startswith("time/")}
        waited, whole = spent.get("time/reward", 0.0), sum(spent.values())
        late = [f.name for f in trainer.reward.composer.functions if f.name not in trainer.reward.early]
        if late and self.slow and waited > 0.2 * whole and waited > 1.0:
            self.console.info(
                f"step {result.step}: {waited:.1f} of {whole:.1f} seconds were spent on rewards after sampling "
                f"({', '.join(late)}); where they judge each prompt's samples by themselves, reward.stream=true lets "
                "them run while others are sampled"
            )
            self.slow = False

    def _check_mismatch(self, result: StepResult) -> None:
        """On the first step the sampler's law and the trainer's must be one; say so when they are not."""
        gap = result.metrics.get("rollout/logprob_gap", 0.0)
        bound = 1e-3 if self.cfg.model.dtype == "float32" else 0.05
        if gap > bound:
            self.console.warn(
                f"sampler and trainer disagree: mean |log-prob difference| {gap:.4f} (expected below {bound}); "
                "possible causes: other temperature, top_p or min_tokens in one of them, dropout, dtype, stale weights"
            )
