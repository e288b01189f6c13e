"""Every preset runs through the real trainer, with the roles and columns that its needs ask for, and nothing else."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.trainer.tiny_run import config, metrics
from verl.algos.advantages import ADVANTAGES
from verl.algos.algorithm import Algorithm
from verl.algos.policy_losses import POLICY_LOSSES
from verl.algos.presets import PRESETS
from verl.trainer import run
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


def test_every_metric_is_explained(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`([a-z_@/A-Z0-9]+)`", page))
    seen: set[str] = set()
    for number, (preset, more) in enumerate(
        [
            ("ppo", {"eval": {"n": 2}, "algorithm": {"entropy_coef": 0.1}}),
            ("grpo", {"algorithm": {"rollout_correction": {"reject": "token", "reject_high": 2.0}}}),
            ("dapo", {"algorithm": {"filter": {"retire_pass_rate": 0.9}}, "reward": {"verifier": "gsm8k"}}),
            ("remax", {}),
            ("kl_cov", {"algorithm": {"policy_loss": {"name": "ppo_clip", "dual_clip": 3.0}}}),
            ("clip_cov", {}),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        cfg = config(folder, preset, **more, trainer={"num_episodes": 1, "max_steps_per_episode": 1})
        run(cfg)
        for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
            seen |= set(json.loads(line)) - {"step"}
    parts = {"reward/digits", "reward/overlong", "eval/reward/digits", "eval/reward/verifier", "reward/verifier"}
    generic = {name for name in seen if name.startswith(("time/", "eval/response/", "eval/pass@", "eval/reward"))}
    assert seen - told - parts - generic == set()
