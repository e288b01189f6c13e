"""The actor: what it scores in one forward, and what its loss chooses from a whole mini-batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.helpers import family_batch, reference_logits, rows_of
from tests.tiny import make_model
from verl.algos.aggregate import Denominators
from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.config import RunConfig, resolve
from verl.controller.executors.local import LocalGroup
from verl.core.batch import Batch
from verl.core.rng import derive_seed
from verl.models.load import load_policy
from verl.workers.actor import ActorWorker
from verl.workers.update_plan import UpdatePlan


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def config(preset: str = "clip_cov", **sections: Any) -> RunConfig:
    base = {"model": {"dtype": "float32"}, "algorithm": {"name": preset}, "actor": {"optim": {"lr": 1e-2}}}
    return resolve([{**base, "rollout": {"sampling": {"temperature": 0.7}}, **sections}], preset_values())


def worker(folder: Path, cfg: RunConfig) -> ActorWorker:
    return ActorWorker(load_policy(folder, cfg.model), cfg, Algorithm(cfg), "cpu", 4)


def scored(actor: ActorWorker) -> Batch:
    """A batch with random advantages and the log-probs before the update."""
    batch = family_batch()
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    batch = batch.with_(advantages=noise)
    old = LocalGroup(actor).call("old_logprobs", batch).result()["old_logprobs"]
    return batch.with_(old_logprobs=old, rollout_logprobs=old)


def test_log_probs_and_squares_come_from_one_forward(folder: Path) -> None:
    actor, batch = worker(folder, config("otb")), family_batch()
    both = LocalGroup(actor).call("old_logprobs_and_squares", batch).result()
    alone = LocalGroup(actor).call("old_logprobs", batch).result()
    assert torch.equal(both["old_logprobs"], alone["old_logprobs"])
    with torch.no_grad():
        logits = reference_logits(AutoModelForCausalLM.from_pretrained(folder), batch)
    law = torch.softmax(logits / 0.7, dim=-1)
    want = torch.where(rows_of(batch), (law**2).sum(-1), 0.0)
    torch.testing.assert_close(both["sum_pi_squared"], want, atol=1e-4, rtol=0)


def test_what_a_loss_chooses_is_seen_once_over_the_whole_mini_batch(folder: Path, monkeypatch) -> None:
    """`prepare` gets all of a mini-batch, under the weights as they are by then, and a seed of its own."""
    cfg = config(update={"epochs": 2, "mini_batches": 2, "micro_batch_tokens": 40})
    actor = worker(folder, cfg)
    batch = scored(actor)
    plan = UpdatePlan.of(batch, cfg.update, seed=5, step=3)
    calls: list[tuple[Batch, torch.Tensor, int]] = []
    chosen: list[torch.Tensor] = []
    prepare, loss = actor.algorithm.prepare, actor.algorithm.actor_loss

    def watched(mini: Batch, logprobs: torch.Tensor, seed: int) -> Batch:
        calls.append((mini, logprobs, seed))
        return prepare(mini, logprobs, seed)

    def seen(logprobs: torch.Tensor, entropy: Any, part: Batch, *rest: Any) -> Any:
        chosen.append(part["chosen"])
        return loss(logprobs, entropy, part, *rest)

    monkeypatch.setattr(actor.algorithm, "prepare", watched)
    monkeypatch.setattr(actor.algorithm, "actor_loss", seen)
    LocalGroup(actor).call("update_actor", batch, plan=plan).result()
    assert [c[2] for c in calls] == [derive_seed(5, "policy_loss", 3, i) for i in range(4)]
    for (mini, _, _), planned in zip(calls, plan.minibatches, strict=True):
        assert torch.equal(mini["token_ids"], batch.take(planned.index)["token_ids"])
    assert len(chosen) > 4, "micro-batches were to be smaller than mini-batches"
    gaps = [float((logprobs - mini["old_logprobs"]).abs().max()) for mini, logprobs, _ in calls]
    assert gaps[0] < 1e-5 and all(gap > 1e-3 for gap in gaps[1:]), gaps


@pytest.mark.parametrize("preset", ["clip_cov", "kl_cov"])
def test_the_update_does_not_depend_on_how_mini_batches_are_cut(folder: Path, preset: str) -> None:
    weights = []
    for size in (24, 100_000):
        loss = {"name": preset, "cov_ratio": 0.2} | ({"cov_low": -5.0} if preset == "clip_cov" else {})
        cfg = config(
            algorithm={"name": preset, "policy_loss": loss},
            actor={"optim": {"lr": 0.1, "eps": 1.0}},  # steps along the gradient, which Adam would stretch to signs
            update={"micro_batch_tokens": size, "epochs": 2, "mini_batches": 2},
        )
        actor = worker(folder, cfg)
        batch = scored(actor)
        # Off the policy of now, so that |l - lo| of kl_cov is nowhere at its kink, where rounding decides the sign.
        batch = batch.with_(old_logprobs=batch["old_logprobs"] + 0.1 * batch["advantages"].sign())
        plan = UpdatePlan.of(batch, cfg.update, seed=5, step=3)
        LocalGroup(actor).call("update_actor", batch, plan=plan).result()
        weights.append({k: v.clone() for k, v in actor.policy.state_dict().items()})
    before = load_policy(folder, cfg.model).state_dict()
    assert any(not torch.equal(before[k], weights[0][k]) for k in before)
    for name in before:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-5, rtol=0)


def test_a_loss_without_prepare_makes_no_extra_forward(folder: Path, monkeypatch) -> None:
    cfg = config("grpo", algorithm={"name": "grpo", "kl": {"coef": 0}})
    actor = worker(folder, cfg)
    batch = scored(actor)

    def never(*args: Any) -> None:
        raise AssertionError("infer was called")

    monkeypatch.setattr(actor.engine, "infer", never)
    actor.update_actor(batch, plan=UpdatePlan.of(batch, cfg.update, 0, 1))


def test_plan_counts_prompts_and_leaves_out_what_teaches_nothing(folder: Path) -> None:
    cfg = config(update={"epochs": 1, "mini_batches": 9})
    batch = family_batch()
    plan = UpdatePlan.of(batch, cfg.update, seed=1, step=2)
    groups = batch["group_id"]
    # Nine groups, one of them (6) without a counted token, so eight mini-batches of one prompt each.
    assert sorted(int(groups[m.index[0]]) for m in plan.minibatches) == [0, 1, 2, 3, 4, 5, 7, 8]
    assert all(m.total.prompts == 1.0 for m in plan.minibatches)
    whole = UpdatePlan.of(batch, config().update, seed=1, step=2).minibatches
    counted = batch["loss_mask"]
    assert whole[0].total == Denominators(float(counted.sum()), 25.0, 8.0)
    nothing = batch.with_(loss_mask=torch.zeros_like(counted))
    assert UpdatePlan.of(nothing, cfg.update, seed=1, step=2).minibatches == ()
    assert UpdatePlan.of(batch.take([]), cfg.update, seed=1, step=2).minibatches == ()


def test_seeds_of_mini_batches_stay_theirs_when_one_is_left_out(folder: Path) -> None:
    cfg = config(update={"epochs": 2, "mini_batches": 9})
    batch = family_batch()
    full = batch.with_(loss_mask=torch.ones_like(batch["loss_mask"]))
    seeds = {m.index: m.seed for m in UpdatePlan.of(full, cfg.update, seed=1, step=2).minibatches[:9]}
    mine = UpdatePlan.of(batch, cfg.update, seed=1, step=2).minibatches
    assert len(mine) == 16 and all(seeds[m.index] == m.seed for m in mine[:8])
    assert len({m.seed for m in mine}) == 16
    other = UpdatePlan.of(batch, cfg.update, seed=1, step=3).minibatches
    assert not {m.seed for m in mine} & {m.seed for m in other}


def test_an_empty_plan_moves_nothing(folder: Path) -> None:
    cfg = config("grpo")
    actor = worker(folder, cfg)
    batch = scored(actor)
    LocalGroup(actor).call("update_actor", batch.with_(ref_logprobs=batch["old_logprobs"]),
                           plan=UpdatePlan.of(batch, cfg.update, 0, 1)).result()  # fmt: skip
    before = {k: v.clone() for k, v in actor.policy.state_dict().items()}
    plan = replace(UpdatePlan.of(batch, cfg.update, 0, 1), minibatches=())
    assert LocalGroup(actor).call("update_actor", batch, plan=plan).result().keys() == {"perf/update_actor"}
    assert all(torch.equal(before[k], v) for k, v in actor.policy.state_dict().items())


def test_an_update_is_the_same_where_training_state_rests_in_between(folder: Path) -> None:
    """Scores need no training state, updates find it as it was left."""
    seen = {}
    for rests in (False, True):
        cfg = config("dapo", update={"offload_between": rests, "mini_batches": 2})
        actor = worker(folder, cfg)
        for step in range(2):
            assert bool(actor.engine.optimizer.grads) is not rests, "gradient buffers"
            batch = scored(actor)
            actor.update_actor(batch, plan=UpdatePlan.of(batch, cfg.update, seed=5, step=step))
        seen[rests] = {name: w.clone() for name, w in actor.engine.shards().items()}
    assert all(torch.equal(seen[True][name], w) for name, w in seen[False].items())
