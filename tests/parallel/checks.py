"""What four processes check together. Each check runs on all of them; the values are on the first of an axis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.models.helpers import ragged_batch
from tests.parallel.models import MODELS, load
from tests.parallel.training import Seen, trained
from verl.config.models import ModelConfig
from verl.controller.partition import partition
from verl.core import Completion, ConfigError, GenRequest, RolloutError, SamplingParams
from verl.core.errors import ModelError
from verl.engines.rollout.native import NativeEngine
from verl.models.compiler import CompileError, compiler
from verl.models.export import export
from verl.models.gather import is_writer, whole_tensors
from verl.models.load import native_policy
from verl.models.logprobs import token_scores
from verl.models.packed import PackedInput
from verl.models.policy import hidden_states
from verl.models.source import ModelSource
from verl.models.value import ValueModel
from verl.parallel.axes import PipelineParallel, TensorParallel
from verl.parallel.collectives import gather_columns
from verl.parallel.layout import Layout
from verl.parallel.mesh import Mesh
from verl.parallel.pipeline import Pipeline
from verl.workers.reward_model import RewardModelWorker

Check = Callable[["World"], None]
CHECKS: dict[str, Check] = {}
FP32 = ModelConfig(dtype="float32", implementation="native")
FP32_HEADS = ("llama", "qwen3")
LAYOUTS = ("tp2", "tp4", "pp2", "tp2pp2")


class World:
    """Groups of four processes: pairs (0, 1), (2, 3), pairs across (0, 2), (1, 3), and all. folder: of the models."""

    def __init__(self, folder: Path):
        self.folder, self.rank = folder, dist.get_rank()
        near, across = ([dist.new_group(ranks) for ranks in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        near_group, across_group, world = near[self.rank // 2], across[self.rank % 2], dist.group.WORLD
        assert world is not None
        self.layouts: dict[str, tuple[TensorParallel | None, PipelineParallel | None]] = {
            "tp2": (TensorParallel.of(near_group), None),
            "tp4": (TensorParallel.of(world), None),
            "pp2": (None, PipelineParallel.of(near_group)),
            "pp4": (None, PipelineParallel.of(world)),
            "tp2pp2": (TensorParallel.of(near_group), PipelineParallel.of(across_group)),
        }

        self.alone = self._alone([*((name, False) for name in MODELS), *((name, True) for name in FP32_HEADS)])

    def _alone(self, wanted: list[tuple[str, bool]]) -> dict[tuple[str, bool], Seen]:
        """What one process sees, by model and fp32_head. Each rank trains some of them, for all."""
        own = {
            (name, fp32): trained(load(self.folder, name), fp32_head=fp32, dtype=dtype_of(name))
            for name, fp32 in wanted[self.rank :: 4]
        }
        parts: list[Any] = [None] * 4
        dist.all_gather_object(parts, own)
        return {key: seen for part in parts for key, seen in part.items()}


def dtype_of(name: str) -> torch.dtype:
    """Five layers of the odd model round to just more than 1e-5; that nothing but rounding differs, float64 shows."""
    return torch.float64 if name == "odd" else torch.float32


def check(name: str) -> Callable[[Check], Check]:
    def add(fn: Check) -> Check:
        CHECKS[name] = fn
        return fn

    return add


def close(got: Tensor, want: Tensor, what: str) -> None:
    """Relative to the norm of the tensor: 1e-5, and 1e-10 in float64."""
    limit = 1e-10 if want.dtype == torch.float64 else 1e-5
    error, scale = float((got - want).double().norm()), float(want.double().norm())
    assert got.dtype == want.dtype and got.shape == want.shape
    assert error <= limit * scale, f"{what}: {error:.2e} of {scale:.2e}"


def same_training(world: World, name: str, layout: str, fp32_head: bool = False, recompute: bool = False) -> None:
    tp, pp = world.layouts[layout]
    got = trained(
        load(world.folder, name), tp, pp, fp32_head=fp32_head, recompute=recompute, dtype=dtype_of(name)
    )  # fmt: skip
    want = world.alone[name, fp32_head]
    if pp is None or pp.last:
        assert len(got.columns) == len(want.columns)
        for i, (mine, theirs) in enumerate(zip(got.columns, want.columns, strict=True)):
            for column, a, b in zip(("log-probs", "entropy", "squares"), mine, theirs, strict=True):
                close(a, b, f"{column} of micro-batch {i}")
        close(*(torch.tensor(x.losses, dtype=dtype_of(name)) for x in (got, want)), "losses")
    assert abs(got.norm - want.norm) <= 1e-5 * want.norm, f"norm {got.norm}, not {want.norm}"
    if (tp is None or tp.first) and (pp is None or pp.first):
        assert got.grads.keys() == want.grads.keys()
        for key in want.grads:
            close(got.grads[key], want.grads[key], f"gradient of {key}")
            close(got.weights[key], want.weights[key], f"weights of {key}")


_COVERED = {"tp4-qwen2", "tp4-mistral", "tp2-odd"}  # by other models with as many ranks, and by tp2pp2-odd
for _name in MODELS:
    for _layout in (p for p in LAYOUTS if f"{p}-{_name}" not in _COVERED):
        CHECKS[f"{_layout}-{_name}"] = lambda world, n=_name, p=_layout: same_training(world, n, p)
CHECKS["pp4-odd"] = lambda world: same_training(world, "odd", "pp4")
for _name in FP32_HEADS:
    CHECKS[f"fp32_head-{_name}"] = lambda world, n=_name: same_training(world, n, "tp2pp2", fp32_head=True)
CHECKS["recompute"] = lambda world: same_training(world, "llama_biases", "tp2pp2", recompute=True)


@check("no_rows")
def no_rows(world: World) -> None:
    """A batch without a row gives zeros, and hangs nobody."""
    tp, _ = world.layouts["tp4"]
    model = load(world.folder, "llama")
    policy = native_policy(model.source, model.config, FP32, tp=tp)
    batch = ragged_batch()
    batch["loss_mask"][:] = False
    scores = token_scores(policy, PackedInput.of(batch, True), 1.0, entropy=True, sum_pi_squared=True)
    assert all(x is not None and not x.any() for x in scores)


@check("value")
def value(world: World) -> None:
    """Values and gradients, with a head that is whole on every rank."""
    model = load(world.folder, "llama_biases")
    packed = PackedInput.of(ragged_batch(), True)
    weight = torch.randn(packed.num_tokens, generator=torch.Generator().manual_seed(0))
    seen = {}
    for layout in (None, "tp2", "tp4", "pp2"):
        tp, pp = world.layouts[layout] if layout else (None, None)
        decoder = native_policy(model.source, model.config, FP32, tp=tp, pp=pp).decoder
        critic = ValueModel(decoder, 32, model.source, "cpu")
        if decoder.stage.last:
            torch.nn.init.normal_(critic.score.weight, generator=torch.Generator().manual_seed(1))
        if pp is None:
            values = critic.values(packed)
            (values * weight).sum().backward()
        else:
            values = _pipelined(critic, pp, packed, weight)
        part = decoder.share.part("model.layers.0.mlp.up_proj.weight")
        up = decoder.layers[0].mlp.up_proj.weight.grad if decoder.stage.first else None
        seen[layout] = values, critic.score.weight.grad if decoder.stage.last else None, up, part
    want, head, up, _ = seen.pop(None)
    for layout, (values, of_head, of_up, part) in seen.items():
        close(values, want, f"{layout}: values")
        if of_head is not None:
            close(of_head, head, f"{layout}: head")
        if of_up is not None:
            close(of_up, up if part is None else part.of(up), f"{layout}: first layer")


def _pipelined(critic: ValueModel, pp: PipelineParallel, packed: PackedInput, weight: Tensor) -> Tensor:
    pipeline, values = Pipeline(pp, torch.float32, "cpu"), torch.zeros(packed.num_tokens)

    def forward(_: int, hidden: Tensor | None) -> Tensor:
        if not pp.last:
            return hidden_states(critic.model, packed, hidden)
        out = critic.values(packed, hidden)
        values.copy_(out.detach())
        return (out * weight).sum()

    shapes = [(len(packed.token_ids), 32)]
    pipeline.forward_backward(shapes, forward)
    inferred = pipeline.infer(
        shapes, lambda _, x: critic.values(packed, x) if pp.last else hidden_states(critic.model, packed, x)
    )
    if pp.last:
        close(inferred[0], values, "inference")
    return pipeline.from_last(values)


PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12, 40, 41, 42, 43], [100, 7], list(range(30, 70))]
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=8, temperature=0.0),
    "drawn": SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, top_k=20, seed=3, min_tokens=2),
}


def generated(world: World, name: str, tp: TensorParallel | None) -> list[list[Completion]]:
    """By the engine as it is; on the odd model by one with few slots, that chunks prompts and keeps prefixes."""
    model = load(world.folder, name)
    policy = native_policy(model.source, model.config, FP32, tp=tp)
    made = []
    few = {"prefill_tokens": 16, "max_sequences": 3, "prefix_cache_gb": 0.01}
    for options in (few,) if name == "odd" else ({},):
        engine = NativeEngine(policy, (2,), **options)
        assert "tensor parallel" in engine.described if tp else "tensor" not in engine.described
        made += [engine.generate(PROMPTS, params, n=2) for params in SAMPLINGS.values()]
        longer = [[*PROMPTS[0], *made[-1][0].token_ids, 50, 51]]  # a second turn, from the prefix cache
        made.append(engine.generate(longer, SAMPLINGS["greedy"]))
        if options:
            assert engine.stats.reused_tokens > 0
    return made


for _name, _layout in (("llama", "tp2"), ("mistral", "tp2"), ("qwen3", "tp4"), ("odd", "tp4")):

    @check(f"generation-{_layout}-{_name}")
    def generation(world: World, name: str = _name, layout: str = _layout) -> None:
        want, got = (generated(world, name, tp) for tp in (None, world.layouts[layout][0]))
        assert len({c.token_ids for c in want[1]}) > 3
        for mine, theirs in zip(got, want, strict=True):
            assert [c.token_ids for c in mine] == [c.token_ids for c in theirs]
            for a, b in zip(mine, theirs, strict=True):
                close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), "log-probs")
        told = [None] * 4
        dist.all_gather_object(told, [[(c.token_ids, c.logprobs) for c in mine] for mine in got])
        assert all(other == told[0] for other in told), "ranks differ"


@check("aborted_and_released")
def aborted_and_released(world: World) -> None:
    """Aborts, a commit and a release between polls: ranks still agree, and log-probs are those of one process."""
    model = load(world.folder, "qwen3")
    seen = []
    for tp in (None, world.layouts["tp4"][0]):
        engine = NativeEngine(native_policy(model.source, model.config, FP32, tp=tp), (2,), max_sequences=2)
        params = SamplingParams(max_tokens=9, temperature=1.0, seed=1)
        engine.submit([GenRequest(str(i), "g", tuple(p), params) for i, p in enumerate(PROMPTS)])
        done = engine.poll() + engine.poll() + engine.abort(["1"])
        engine.commit(1)
        done += engine.poll()
        engine.place("released")
        while engine.pending:
            done += engine.poll()
        seen.append({c.request_id: c for c in done})
    want, got = seen
    assert len(want) == 4 and want.keys() == got.keys()
    for key in want:
        assert (want[key].token_ids, want[key].finish) == (got[key].token_ids, got[key].finish)
        close(torch.tensor(got[key].logprobs), torch.tensor(want[key].logprobs), key)


@check("refusals")
def refusals(world: World) -> None:
    model = load(world.folder, "llama")
    stage = native_policy(model.source, model.config, FP32, pp=world.layouts["pp2"][1])
    with pytest.raises(RolloutError, match="pipeline stage cannot generate"):
        NativeEngine(stage, (2,))
    cut = native_policy(model.source, model.config, FP32, tp=world.layouts["tp2"][0])
    with pytest.raises(ConfigError, match="rollout.compile=on.*cut over 2"):
        NativeEngine(cut, (2,), compile="on")
    other = load(world.folder, "odd").source
    with pytest.raises(ModelError, match=r"has shape \(331, 32\), its config says \(2\d\d|3\d\d, 32\)"):
        native_policy(other, model.config, FP32, tp=world.layouts["tp2"][0])


@check("loads_its_share")
def loads_its_share(world: World) -> None:
    """No more is read than the share, and all of the model is somewhere."""
    for name in ("llama", "qwen3", "odd"):
        model = load(world.folder, name)
        tp, pp = world.layouts["tp2pp2"]
        policy = native_policy(model.source, model.config, FP32, tp=tp, pp=pp)
        read = dict(model.source.tensors(policy.decoder.share))
        assert read.keys() == dict(policy.named_parameters()).keys()
        assert all(torch.equal(read[key], param) for key, param in policy.named_parameters())
        whole = whole_tensors(policy, dict(policy.named_parameters()))
        assert bool(whole) == is_writer(policy) == (world.rank == 0)
        if whole:
            want = dict(model.source.tensors())
            assert whole.keys() == want.keys()
            assert all(torch.equal(whole[key], want[key]) for key in want)


@check("gathers_columns")
def gathers_columns(world: World) -> None:
    tp = world.layouts["tp4"][0]
    assert tp is not None
    x = torch.arange(3 * 10.0).view(3, 10).to(torch.bfloat16)
    mine = x[:, 3 * tp.rank : 3 * tp.rank + 3]
    assert torch.equal(gather_columns(mine, 3, 10, tp), x)


@check("bf16_kernels")
def bf16_kernels(world: World) -> None:
    """The compiled kernels inside a rank: as close to fp32 as they are on one process."""
    try:
        compiler()
    except CompileError:
        return
    model = load(world.folder, "llama")
    packed = PackedInput.of(ragged_batch(), True)
    seen = []
    for dtype, compile, tp in (
        ("float32", "off", None), ("bfloat16", "on", None), ("bfloat16", "on", world.layouts["tp2"][0])
    ):  # fmt: skip
        cfg = ModelConfig(dtype=dtype, implementation="native", compile=compile)
        policy = native_policy(model.source, model.config, cfg, tp=tp)
        scores = token_scores(policy, packed, 0.9, entropy=True)
        assert scores.entropy is not None
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        grads = {name: p.grad.float() for name, p in policy.named_parameters()}
        seen.append((scores.logprobs.detach(), whole_tensors(policy, grads)))
    (want, exact), (one, alone), (got, cut) = seen
    assert float((got - want).norm()) <= 1.5 * float((one - want).norm())
    for key in cut:
        error, usual = ((x[key] - exact[key]).norm() / exact[key].norm() for x in (cut, alone))
        assert float(error) <= 1.5 * float(usual) + 1e-3, f"{key}: {error:.3f}, on one process {usual:.3f}"


@check("export")
def exported(world: World) -> None:
    """The folder is the model again; whoever returns finds it there. Where it cannot be written, all learn of it."""
    model = load(world.folder, "odd")
    tp, pp = world.layouts["tp2pp2"]
    policy = native_policy(model.source, model.config, FP32, tp=tp, pp=pp)
    out = export(policy, world.folder / "out")
    again = native_policy(ModelSource(out, "out"), model.config, FP32)
    want = dict(model.source.tensors())
    assert all(torch.equal(want[key], param) for key, param in again.named_parameters())
    (world.folder / f"file{world.rank}").write_text("")
    with pytest.raises(ModelError, match=r"cannot be written" if world.rank == 0 else "its message says why"):
        export(policy, world.folder / "file0" / "out")


@check("reward_model")
def rewarded(world: World) -> None:
    """FSDP over pairs, with texts that do not divide: ranks with none, and with more passes than others."""
    from verl.models.load import load_reward_model

    texts = [([{"role": "user", "content": "What is 1 + 2 ? " * n}], str(n)) for n in (1, 9, 2, 30, 3)]
    judges = [load_reward_model(world.folder / "judge", FP32, max_length=100) for _ in range(2)]
    worker = RewardModelWorker(judges[0], Mesh.of(Layout(dp=4, fsdp=2), "cpu"))
    judges[0].module.config.get_text_config().pad_token_id = None  # each text alone: one pass each
    for count in (5, 3, 1):
        mine = partition([len(t[0][0]["content"]) for t in texts[:count]], 4)[world.rank]
        before = judges[1].truncated
        want = judges[1].score([texts[i] for i in mine])
        scores, cut = worker.score(conversations=[texts[i] for i in mine])
        assert scores == pytest.approx(want, abs=1e-5) and cut == judges[1].truncated - before
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in judges[0].module.parameters())
    assert held < 0.6 * sum(p.numel() for p in judges[1].module.parameters())
