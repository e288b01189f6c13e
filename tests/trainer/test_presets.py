"""Every preset runs through the real trainer, with the roles and columns that its needs ask for, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.trainer.tiny_run import config, metrics
from verl.algos.advantages import ADVANTAGES
from verl.algos.algorithm import Algorithm
from verl.algos.policy_losses import POLICY_LOSSES
from verl.algos.presets import PRESETS
from verl.trainer.build import build
from verl.trainer.hooks import Hook
from verl.trainer.loop import StepResult, Trainer
from verl.utils.console import RunConsole


class Keep(Hook):
    """What the last step trained on."""

    result: StepResult | None = None

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.result = result


def test_every_registered_function_is_reached_by_a_preset() -> None:
    algorithms = [p.values["algorithm"] for p in PRESETS.values()]
    assert {a["advantage"]["name"] for a in algorithms} == set(ADVANTAGES.names())
    assert {a["policy_loss"]["name"] for a in algorithms} == set(POLICY_LOSSES.names())


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_trains(preset: str, tmp_path: Path) -> None:
    verifier = {"verifier": "gsm8k"} if preset == "scale_rl" else {}
    cfg = config(
        tmp_path,
        preset,
        trainer={"num_episodes": 1, "max_steps_per_episode": 2},
        update={"mini_batches": 2},
        eval={"every": 0},
        data={"eval_size": 0},
        reward=verifier,
    )
    built = build(cfg, RunConsole())
    keep = Keep()
    built.trainer.hooks = [*built.trainer.hooks, keep]
    before = {n: p.clone() for n, p in built.trainer.roles.actor.worker.engine.shards().items()}
    built.trainer.fit()
    built.tracker.close()
    needs, roles = Algorithm(cfg).needs, built.trainer.roles
    assert (roles.critic is not None) == ("values" in needs) == (PRESETS[preset].name == "ppo")
    assert (roles.ref is not None) == (PRESETS[preset].values["algorithm"]["kl"]["coef"] > 0)
    assert keep.result is not None
    for column in ("greedy_reward", "reward_parts", "sum_pi_squared", "values", "old_logprobs"):
        assert (column in keep.result.batch) == (column in needs), column
    rows = metrics(tmp_path / "out")
    assert len(rows) == 2 and all(math.isfinite(v) for row in rows for v in row.values())
    assert all(row["rollout/ess"] > 0.99 and row["rollout/k3"] < 1e-4 for row in rows)
    assert all(row["actor/skipped_steps"] == 0 for row in rows)
    after = built.trainer.roles.actor.worker.engine.shards()
    assert any(not before[n].equal(p) for n, p in after.items())
