"""Every preset learns a toy task to a level that it does not reach with a flipped sign, a lost mask, or denominators
that count more than what is trained on.
"""

from __future__ import annotations

import pytest

from tests.algos.toy import Toy
from verl.algos.presets import PRESETS

STEPS, LEVEL, CHANCE = 40, 0.8, 1 / 6
LR = {"grpo_passk": 12.0}  # one sample in six has an advantage


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_learns_and_its_faults_do_not(preset: str) -> None:
    def reached(fault: str | None) -> float:
        return Toy(preset, LR.get(preset, 4.0), fault).train(STEPS)

    assert Toy(preset, 4.0).accuracy() == pytest.approx(CHANCE)
    assert reached(None) > LEVEL
    for fault in ("sign", "mask", "denominator"):
        assert reached(fault) < LEVEL, fault


@pytest.mark.parametrize("preset", ["ppo", "grpo", "dapo"])
def test_it_is_not_the_seed(preset: str) -> None:
    assert min(Toy(preset, 4.0, seed=seed).train(STEPS) for seed in range(1, 6)) > LEVEL
