"""Rounds of rollout and reward: which groups a step trains on, and what it says of the others."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from verl.config import RunConfig
from verl.config.loader import check
from verl.core import VerlError
from verl.core.prompt import Prompt
from verl.core.trajectory import Trajectory
from verl.rewards.composer import Rewards
from verl.trainer.collect import Collector
from verl.trainer.seldom import Seldom
from verl.trainer.source import Group

PROMPTS = 40


class Script:
    """Source and reward in one. kinds: what each prompt's samples score, by prompt number: `mixed` or a constant."""

    n = 2
    model = None
    early = frozenset()

    def __init__(self, kinds: list[Any], per_step: int, greedy: bool = False):
        self.kinds, self.per_step, self.greedy = kinds, per_step, greedy
        self.prompts = [Prompt(str(i), (1, 2), "") for i in range(len(kinds))]
        self.retired: set[int] = set()
        self.asked: list[list[int]] = []
        self.finish: dict[tuple[int, int], str] = {}
        self.told = 0

    enough = property(lambda self: len(self.prompts) - len(self.retired) >= self.per_step)

    def planned(self, step: int) -> list[int]:
        return list(range(self.per_step))

    def more(self, step, turn, count, taken) -> list[int]:
        taken = set(taken)
        self.turn = turn
        return [i for i in range(len(self.prompts)) if i not in taken][:count]

    def counts(self):
        self.told += 5
        return {"preemptions": self.told}

    def sample(self, step, prompts, first_group=0):
        self.asked.append(list(prompts))

        def one(i: int, g: int, k: int) -> Trajectory:
            finish = self.finish.get((i, k), "stop")
            size = 3 + k
            mask = (0, 0) + (1,) * size
            return Trajectory(g, k, self.prompts[i], (1,) * (2 + size), mask, (0.0,) * (2 + size), finish, (0,), "")

        for place, i in reversed(list(enumerate(prompts))):
            g = first_group + place
            yield {place: Group(i, tuple(one(i, g, k) for k in range(2)), one(i, g, 2) if self.greedy else None)}
            yield {}

    def compose(self, trajectories, judged, early) -> Rewards:
        assert judged is None and early == {}
        total = []
        for t in trajectories:
            kind = self.kinds[int(t.prompt.id)]
            total.append(float([1, 0, 5][t.sample_id] if kind == "mixed" else kind))
        return Rewards(total, {"verifier": list(total), "odd": [float(len(t.token_ids)) for t in trajectories]},
                       {"verifier": 1.0, "odd": 0.0})  # fmt: skip


def collector(script: Script, needs=(), said=None, **sections: Any) -> Collector:
    base = {"trainer": {"prompts_per_step": script.per_step}, "rollout": {"n": 2, "max_response_tokens": 4}}
    cfg = check(RunConfig, base | sections)
    return Collector(cfg, script, script, frozenset(needs), ([] if said is None else said).append)


@contextmanager
def phase(name: str):
    yield


def groups_of(got) -> list[int]:
    return [int(p) for p in dict.fromkeys(t.prompt.id for t in got.trajectories)]


def filtered(mode: str = "resample", **more: Any) -> dict[str, Any]:
    return {"algorithm": {"filter": {"constant_groups": mode, **more}}}


def test_without_a_filter_there_is_one_round_and_all_are_kept() -> None:
    script = Script([0, "mixed", 1, 0], 4)
    got = collector(script).collect(1, phase)
    assert script.asked == [[0, 1, 2, 3]] and got.batch.num_seqs == 8
    assert not [name for name in got.metrics if name.startswith("filter/")]
    assert got.metrics.values_by_name()["rollout/preemptions"] == 5, "those of this step alone"
    np.testing.assert_array_equal(got.batch["reward"], [0, 0, 1, 0, 1, 1, 0, 0])


def test_drop_leaves_constant_groups_out_but_not_out_of_the_metrics() -> None:
    script = Script([0, "mixed", 1, "mixed"], 4)
    got = collector(script, **filtered("drop")).collect(1, phase)
    assert got.batch["group_id"].tolist() == [1, 1, 3, 3]
    values = got.metrics.values_by_name()
    assert values["reward"] == pytest.approx((0 + 0 + 1 + 0 + 1 + 1 + 1 + 0) / 8)
    assert values["filter/kept"] == 0.5 and values["filter/rounds"] == 1 and "filter/short" not in values
    assert len(got.trajectories) == len(got.rewards.total) == 8


def test_resample_asks_for_what_is_missing_by_the_share_kept() -> None:
    """Round 1: 1 of 4 kept, so 3 missing at a quarter are 12, cut to 4. Round 2: 3 of 8, 1 missing: 3 prompts."""
    script = Script([0, "mixed", 0, 1, "mixed", 0, "mixed", 1, "mixed", "mixed", "mixed", 0], 4)
    got = collector(script, **filtered()).collect(1, phase)
    assert script.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert got.batch["group_id"].tolist() == [1, 1, 4, 4, 6, 6, 8, 8], "extra groups are left off, in order"
    values = got.metrics.values_by_name()
    assert values["filter/kept"] == pytest.approx(6 / 11) and values["filter/rounds"] == 3
    assert values["filter/short"] == 0 and groups_of(got) == list(range(11))
    assert [t.group_id for t in got.trajectories] == [g for g in range(11) for _ in range(2)]


@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_fills_the_step_or_uses_its_rounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = ["mixed" if x < 0.3 else int(x < 0.6) for x in rng.random(PROMPTS)]
    script = Script(kinds, 6)
    got = collector(script, **filtered(max_rounds=5)).collect(1, phase)
    kept, seen = 0, 0
    for number, asked in enumerate(script.asked):
        if number:
            missing = 6 - kept
            want = 6 if kept == 0 else min(6, math.ceil(missing * seen / kept - 1e-9))
            assert missing > 0 and len(asked) == min(want, PROMPTS - seen) >= min(missing, PROMPTS - seen)
        kept += sum(kinds[i] == "mixed" for i in asked)
        seen += len(asked)
    assert len(script.asked) <= 5 and got.batch.num_seqs == 2 * min(6, kept)
    assert len({i for asked in script.asked for i in asked}) == seen
    assert kept >= 6 or len(script.asked) == 5


def test_short_goes_on_and_says_so_seldom() -> None:
    said: list[str] = []
    script = Script([0] * 30 + ["mixed"], 4)
    c = collector(script, said=said, **filtered(max_rounds=3))
    for step in range(1, 23):
        got = c.collect(step, phase)
    assert got.batch.num_seqs == 0 and got.metrics.values_by_name()["filter/short"] == 4
    assert [s.split(":")[0] for s in said] == ["step 1", "step 11", "step 21"]
    for word in ("0 of 4", "3 rounds", "12 prompts", "max_rounds", "rollout.n", "temperature", "constant_groups=drop"):
        assert word in said[0], said[0]
    assert "no more" not in said[0]


def test_stops_early_where_the_data_has_no_more() -> None:
    said: list[str] = []
    script = Script([0, 0, 0, 0, "mixed", 1], 4)
    got = collector(script, said=said, **filtered(max_rounds=9)).collect(1, phase)
    assert script.asked == [[0, 1, 2, 3], [4, 5]] and got.batch["group_id"].tolist() == [4, 4]
    assert "1 of 4" in said[0] and "2 rounds with 6 prompts, and the data has no more" in said[0]


def test_stop_ends_the_run_with_numbers_and_knobs() -> None:
    script = Script([0, 0, 0, 0, "mixed", 1], 4)
    with pytest.raises(VerlError, match=r"^step 7: only 1 of 4 .*max_rounds.*when_short=continue$"):
        collector(script, **filtered(when_short="stop")).collect(7, phase)
    full = Script(["mixed"] * 4, 4)
    assert collector(full, **filtered(when_short="stop")).collect(7, phase).batch.num_seqs == 8


def test_the_empty_batch_has_all_columns() -> None:
    script = Script([0, 1], 2, greedy=True)
    c = collector(script, needs=("greedy_reward", "reward_parts"), **filtered("drop"))
    batch = c.collect(1, phase).batch
    assert batch.num_seqs == batch.num_tokens == 0 and batch["reward_parts"].shape == (0, 2)


def test_metric_may_be_a_part() -> None:
    """`odd` differs in every group, whatever the score."""
    script = Script([0, 1, "mixed"], 3)
    assert collector(script, **filtered("drop", metric="odd")).collect(1, phase).batch.num_seqs == 6
    assert collector(script, **filtered("drop", metric="verifier")).collect(1, phase).batch.num_seqs == 2


def test_score_is_compared_before_the_length_is_punished() -> None:
    """Lengths differ within a group, so `overlong` and the total do; the score does not."""
    script = Script([1, "mixed"], 2)
    overlong = {"reward": {"overlong": {"buffer": 0.5}}}
    got = collector(script, **filtered("drop"), **overlong).collect(1, phase)
    assert got.batch["group_id"].tolist() == [1, 1]
    np.testing.assert_allclose(got.batch["reward"], [1 - 0.5, 0 - 1.0])
    assert got.rewards.parts["overlong"] == [-0.5, -1.0] * 2 and got.rewards.weights["overlong"] == 1.0
    got = collector(script, **filtered("drop", metric="overlong"), **overlong).collect(1, phase)
    assert got.batch.num_seqs == 4


def test_samples_that_are_not_trained_on_do_not_make_a_group_differ() -> None:
    script = Script(["mixed", "mixed", "mixed"], 3)
    script.finish = {(0, 1): "length", (1, 0): "abort", (2, 0): "length", (2, 1): "length"}
    plain = collector(script, **filtered("drop")).collect(1, phase).batch
    assert plain["group_id"].tolist() == [0, 0, 2, 2] and not plain["excluded"].any()
    strict = collector(script, **filtered("drop", exclude_truncated=True)).collect(1, phase).batch
    assert strict.num_seqs == 0
    kept = collector(script, **filtered("keep", exclude_truncated=True)).collect(1, phase).batch
    assert kept["excluded"].tolist() == [False, True, True, False, True, True]
    kept = collector(script, **filtered("keep")).collect(1, phase).batch
    assert kept["excluded"].tolist() == [False, False, True, False, False, False]


def test_greedy_rewards_and_parts_become_columns_of_kept_groups() -> None:
    script = Script([0, "mixed", 1, "mixed"], 4, greedy=True)
    needs = ("greedy_reward", "reward_parts")
    got = collector(script, needs=needs, **filtered("drop"), reward={"overlong": {"buffer": 0.5}}).collect(1, phase)
    # A greedy response has 5 tokens, one more than the longest in the buffer's terms: -1.5 each.
    np.testing.assert_allclose(got.batch["greedy_reward"], [5 - 1.5] * 4)
    np.testing.assert_allclose(got.batch["reward_parts"], [[1, 5, -0.5], [0, 6, -1.0]] * 2)
    np.testing.assert_allclose(got.batch["reward_weights"], [[1, 0, 1]] * 4)
    total = (got.batch["reward_parts"] * got.batch["reward_weights"]).sum(1)
    torch.testing.assert_close(total, got.batch["reward"])
    values = got.metrics.values_by_name()
    assert values["reward/greedy"] == pytest.approx(np.mean([0, 5, 1, 5]) - 1.5)
    assert len(got.trajectories) == 8 and values["response/length"] == 3.5


def test_solved_prompts_retire_and_it_is_said_once_when_too_few_are_left() -> None:
    said: list[str] = []
    script = Script([1, "mixed", 1, 0], 2)
    c = collector(script, said=said, algorithm={"filter": {"retire_pass_rate": 1.0}})
    script.planned = lambda step: [[0, 1], [2, 3], [0, 2]][step - 1]
    counts = [c.collect(step, phase).metrics.values_by_name()["filter/retired"] for step in (1, 2, 3)]
    assert counts == [1, 2, 2] and script.retired == {0, 2} and not said
    script = Script([1, "mixed", 1, 0], 2)
    c = collector(script, said=said, algorithm={"filter": {"retire_pass_rate": 0.5}})
    script.planned = lambda step: [[0, 1], [2, 3], [0, 2]][step - 1]
    counts = [c.collect(step, phase).metrics.values_by_name()["filter/retired"] for step in (1, 2, 3)]
    assert counts == [2, 3, 3] and len(said) == 1 and "3 of 4 prompts are retired" in said[0]


def test_seldom_counts_each_kind_by_itself() -> None:
    said: list[str] = []
    warn = Seldom(said.append, every=3)
    for step in (1, 2, 3, 4, 5):
        warn("a", step, "a")
    warn("b", 5, "b")
    assert said == ["step 1: a", "step 4: a", "step 5: b"]
