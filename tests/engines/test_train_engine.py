"""The train engine: the gradient does not depend on how a mini-batch is cut; masters, clipping and skips are exact."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.tiny import make_model
from verl.algos.aggregate import MODES, Denominators, tokens_per_prompt
from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.algos.segments import Segments
from verl.checkpoint import sharded
from verl.config import RunConfig, resolve
from verl.config.algorithm import UpdateConfig
from verl.config.models import ModelConfig, OptimConfig
from verl.core.batch import Batch, cumulative
from verl.core.errors import ConfigError
from verl.engines.train.engine import EmbeddedTrainEngine, Outputs
from verl.engines.train.micro_batches import split, tokens_at_once
from verl.engines.train.schedule import lr_at
from verl.models.load import load_policy
from verl.models.logprobs import token_logprobs
from verl.models.packed import PackedInput
from verl.workers.update_plan import UpdatePlan


def config(**algorithm: object) -> RunConfig:
    return resolve([{"algorithm": {"name": "grpo", **algorithm}, "model": {"dtype": "float32"}}], preset_values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), family="llama", seed=3)


def sampled(seed: int = 0, groups: int = 3, n: int = 4) -> Batch:
    """Groups of n samples of a prompt; some responses hold an unsampled observation, one has no sampled token."""
    rng = np.random.default_rng(seed)
    ids, mask, lengths, group = [], [], [], []
    for g in range(groups):
        prompt = rng.integers(4, 250, rng.integers(3, 9)).tolist()
        for k in range(n):
            size = int(rng.integers(1, 7))
            mine = [1] * size
            if size > 3:
                mine[2] = 0
            if g == 1 and k == 2:
                mine = [0] * size
            ids += prompt + rng.integers(4, 250, size).tolist()
            mask += [0] * len(prompt) + mine
            lengths.append(len(prompt) + size)
            group.append(g)
    total = len(ids)
    return Batch(
        cumulative(torch.tensor(lengths)),
        {
            "token_ids": torch.tensor(ids),
            "loss_mask": torch.tensor(mask, dtype=torch.bool),
            "group_id": torch.tensor(group),
            "advantages": torch.tensor(rng.normal(size=total), dtype=torch.float32),
            "rollout_logprobs": torch.tensor(rng.normal(size=total) - 5, dtype=torch.float32),
            "ref_logprobs": torch.tensor(rng.normal(size=total) - 5, dtype=torch.float32),
            "old_logprobs": torch.tensor(rng.normal(size=total) * 0.3 - 5.5, dtype=torch.float32),
        },
    )


def gradients(
    folder, cfg: RunConfig, batch: Batch, max_tokens: int, share: bool, parts: int = 1
) -> dict[str, torch.Tensor]:
    """Gradients of one mini-batch; `parts` simulates ranks that each hold some of its sequences."""
    policy = load_policy(folder, cfg.model, "cpu")
    algorithm = Algorithm(cfg)
    update = cfg.update.model_copy(update={"micro_batch_tokens": max_tokens, "share_prompt": share})

    def forward(packed) -> Outputs:
        return Outputs(*token_logprobs(policy, packed, 0.7, entropy=True))

    engine = EmbeddedTrainEngine(policy, forward, update, "cpu", OptimConfig())
    s = Segments.of(batch.cu_seqlens, batch["loss_mask"])
    batch = batch.with_(group_tokens=tokens_per_prompt(s, batch["group_id"]).float())
    total = Denominators.of(s, batch["group_id"])
    for r in range(parts):
        rank = batch.take(range(r, batch.num_seqs, parts))
        engine.forward_backward(rank, lambda out, part: algorithm.actor_loss(out.values, out.entropy, part, total))
    return {n: p.grad.clone() for n, p in policy.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_the_same_for_every_split(folder, mode: str) -> None:
    cfg = config(aggregation=mode, entropy_coef=0.1)
    batch = sampled()
    whole = gradients(folder, cfg, batch, 10_000, share=False)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    for max_tokens, share, parts in ((1, False, 1), (20, False, 2), (10_000, True, 1), (25, True, 1), (30, True, 3)):
        again = gradients(folder, cfg, batch, max_tokens, share, parts)
        for name, g in whole.items():
            scale = float(g.norm())
            assert float((again[name] - g).norm()) <= 1e-5 * scale + 1e-9, (mode, max_tokens, share, parts, name)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("limit", [1, 12, 40, 1000])
def test_micro_batches_hold_every_sequence_once(limit: int, share: bool) -> None:
    batch = sampled(seed=5, groups=4)
    cut = split(batch, limit, share)
    assert sorted(i for part in cut for i in part) == list(range(batch.num_seqs))
    if not share:
        for part in cut:
            assert len(part) == 1 or int(batch.lengths[part].sum()) <= limit


def test_the_budget_of_a_micro_batch_is_the_users_or_the_devices() -> None:
    given, own = UpdateConfig(micro_batch_tokens=5), UpdateConfig()
    assert [tokens_at_once(u, d) for u in (given, own) for d in ("cpu", "cuda")] == [5, 5, 2048, 8192]


def test_micro_batches_count_at_least_what_is_packed() -> None:
    """A group may hold several prompts, and prompts of other groups may begin alike: never more tokens than allowed."""
    head = list(range(30, 50))
    prompts = [[*head, g, k % 2] for g in range(4) for k in range(4)]
    seqs = [[*p, *range(100 + i, 104 + i)] for i, p in enumerate(prompts)]
    batch = Batch(
        cumulative(torch.tensor([len(s) for s in seqs])),
        {
            "token_ids": torch.tensor([t for s in seqs for t in s]),
            "loss_mask": torch.tensor(([0] * 22 + [1] * 4) * 16, dtype=torch.bool),
            "group_id": torch.tensor([g for g in range(4) for _ in range(4)]),
        },
    )
    for limit in (30, 31, 60, 100, 1000):
        for part in split(batch, limit, True):
            assert len(PackedInput.of(batch.take(part), True).token_ids) <= limit
    assert [len(part) for part in split(batch, 30, True)] == [2] * 8


def test_infer_gives_each_row_its_own_value_however_it_is_cut(folder) -> None:
    policy = load_policy(folder, ModelConfig(dtype="float32"), "cpu")

    def forward(packed) -> Outputs:
        return Outputs(token_logprobs(policy, packed, 1.0)[0])

    batch = sampled(seed=2)
    seen = []
    for tokens, share in ((10_000, False), (9, False), (30, True)):
        update = config().update.model_copy(update={"micro_batch_tokens": tokens, "share_prompt": share})
        seen.append(EmbeddedTrainEngine(policy, forward, update, "cpu").infer(batch))
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], atol=2e-5, rtol=1e-5)
    assert (seen[0][~batch["loss_mask"]] == 0).all() and (seen[0][batch["loss_mask"]] < 0).all()


class Line(torch.nn.Module):
    """y = w x with one weight, to compare the optimizer with arithmetic."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 1), 0.5, dtype=dtype))


def tiny_engine(dtype: torch.dtype, **optim: object) -> EmbeddedTrainEngine:
    module = Line(dtype)
    cfg = OptimConfig(lr=0.01, **optim)
    return EmbeddedTrainEngine(
        module, lambda packed: Outputs(torch.zeros(1)), config().update, "cpu", cfg, total_steps=10
    )


def test_bf16_gradients_are_summed_in_fp32_and_masters_keep_small_steps() -> None:
    engine = tiny_engine(torch.bfloat16, max_grad_norm=1e9)
    module = engine.module
    for _ in range(257):  # in bf16, 256 + 1 = 256
        (module.weight.sum() * 1.0).backward()
    assert engine.optimizer.grads[0].tolist() == [[257.0], [257.0]] and module.weight.grad is None
    engine.optim_step()
    want = torch.optim.AdamW([p := torch.nn.Parameter(torch.full((2, 1), 0.5))], lr=0.01, weight_decay=0.0)
    p.grad = torch.full((2, 1), 257.0)
    want.step()
    torch.testing.assert_close(engine.optimizer.masters[0], p.detach())
    assert torch.equal(module.weight, p.detach().bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_never_reach_the_weights(bad: float) -> None:
    engine = tiny_engine(torch.float32)
    before = engine.module.weight.detach().clone()
    (engine.module.weight.sum() * bad).backward()
    metrics = engine.optim_step().values_by_name()
    assert torch.equal(engine.module.weight, before) and metrics["actor/skipped_steps"] == 1
    engine.module.weight.sum().backward()
    assert engine.optim_step().values_by_name()["actor/skipped_steps"] == 0
    assert not torch.equal(engine.module.weight, before) and torch.isfinite(engine.module.weight).all()


def test_clipping_scales_to_the_norm() -> None:
    engine = tiny_engine(torch.float32, max_grad_norm=0.5, betas=(0.0, 0.0), eps=1.0)
    (engine.module.weight * torch.tensor([[3.0], [4.0]])).sum().backward()
    metrics = engine.optim_step().values_by_name()
    assert metrics["actor/grad_norm"] == pytest.approx(5.0)
    g = np.array([0.3, 0.4])
    np.testing.assert_allclose(engine.module.weight.detach().flatten(), 0.5 - 0.01 * g / (g + 1.0), rtol=1e-5)


def test_optimizer_state_round_trip_is_bitwise(tmp_path) -> None:
    engines = [tiny_engine(torch.bfloat16), tiny_engine(torch.bfloat16)]
    for _ in range(3):
        engines[0].module.weight.pow(2).sum().backward()
        engines[0].optim_step()
    engines[0].skipped_steps = 2
    sharded.save(tmp_path, engines[0].owned_pieces())
    engines[1].load(engines[0].counters(), partial(sharded.load, tmp_path, complete=True))
    assert engines[1].counters() == {"steps": 3, "skipped_steps": 2}
    for engine in engines:
        engine.module.weight.pow(2).sum().backward()
        engine.optim_step()
    assert torch.equal(engines[0].optimizer.masters[0], engines[1].optimizer.masters[0])
    assert torch.equal(engines[0].module.weight, engines[1].module.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_placed_engine_goes_on_where_it_was(dtype: torch.dtype) -> None:
    """Moving copies all tensors of the state; gradient buffers are gone in between, and nothing trains there."""
    engines = [tiny_engine(dtype), tiny_engine(dtype)]
    for where in ("device", "released", "host"):
        engines[1].place(where)
        if where != "device":
            assert engines[1].optimizer.grads == []
            with pytest.raises(RuntimeError, match=f"placed on '{where}'"):
                engines[1].optim_step()
            engines[1]._moved(torch.clone if where == "host" else None, torch.clone)  # what place does on a GPU
        engines[1].place("device")
        for engine in engines:
            engine.module.weight.pow(2).sum().backward()
            engine.optim_step()
        assert torch.equal(engines[0].module.weight, engines[1].module.weight)
    assert engines[1].optimizer.steps == 3


@pytest.mark.parametrize(("dtype", "moved"), [(torch.bfloat16, 3 * 4), (torch.float32, 2 * 4)])
def test_what_rests_on_the_host_between_updates(dtype, moved, monkeypatch) -> None:
    """By count: masters and moments of a bf16 model (12 bytes a weight) and no gradients (4), so that 2 of 18 stay."""
    engine, at_rest = tiny_engine(dtype), []
    engine.module.weight.pow(2).sum().backward()
    engine.optim_step()

    def to(device: str) -> object:
        return lambda x: (at_rest.append(x.nbytes * (x.ndim > 0)) if device == "cpu" else None, x.clone())[1]

    monkeypatch.setattr("verl.engines.train.engine._to", to)
    engine.device = "cuda"  # which `place` alone reads here
    storage = engine.module.weight.data_ptr()
    engine.place("released")
    assert sum(at_rest) == moved * engine.module.weight.numel()
    assert engine.optimizer.grads == [] and engine.module.weight.data_ptr() == storage
    engine._must_be_here(state=False)


def test_offloading_is_for_sharded_models_and_changes_nothing_on_a_cpu() -> None:
    update = UpdateConfig(cpu_offload=True)
    assert not EmbeddedTrainEngine(Line(torch.float32), lambda packed: Outputs(torch.zeros(1)), update, "cpu").offloaded
    with pytest.raises(ConfigError, match="update.cpu_offload: only a model that is sharded"):
        EmbeddedTrainEngine(Line(torch.float32), lambda packed: Outputs(torch.zeros(1)), update, "cuda")


def test_schedule_counts_optimizer_steps() -> None:
    cfg = OptimConfig(lr=1.0, warmup_steps=4, schedule="cosine", min_lr_ratio=0.1)
    got = [lr_at(s, cfg, 14) for s in (0, 3, 4, 9, 14)]
    want = [0.25, 1.0, 1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)), 0.1]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert lr_at(9, OptimConfig(lr=1.0, warmup_steps=4, schedule="linear"), 14) == pytest.approx(0.5)


def test_update_plan_keeps_groups_and_counts_whole_mini_batches() -> None:
    batch = sampled(groups=5, n=3)
    cfg = config().update.model_copy(update={"epochs": 2, "mini_batches": 2})
    plan = UpdatePlan.of(batch, cfg, seed=1, step=4)
    assert len(plan.minibatches) == 4
    counts = Segments.of(batch.cu_seqlens, batch["loss_mask"]).counts
    for epoch in (plan.minibatches[:2], plan.minibatches[2:]):
        assert sorted(i for m in epoch for i in m.index) == list(range(batch.num_seqs))
    for m in plan.minibatches:
        groups = batch["group_id"][list(m.index)].tolist()
        assert all(groups.count(g) == 3 for g in groups)
        mine = counts[list(m.index)]
        total = Denominators(float(mine.sum()), float((mine > 0).sum()), float(len(set(groups))))
        assert m.total == total
    assert plan == UpdatePlan.of(batch, cfg, seed=1, step=4) != UpdatePlan.of(batch, cfg, seed=1, step=5)
