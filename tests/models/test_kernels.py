"""The compiled kernels of training against float64 autograd on the same bf16 inputs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.helpers import BF16, FP32, HF, family_batch
from tests.models.test_packed import TREES, Table, Tree, blocks_of, loop_attention
from tests.tiny import has_compiler, make_model
from verl.core import ConfigError
from verl.models import compiler, ops
from verl.models import kernels as kernels_module
from verl.models.attention import PackedAttention
from verl.models.compiler import CompileError
from verl.models.kernels import Kernels, load
from verl.models.load import load_policy, load_value_model
from verl.models.logprobs import token_logprobs, token_scores
from verl.models.packed import PackedInput
from verl.models.plan import Block, Plan

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")
ROUNDING = 2.0**-8
"""Relative error of one rounding to bf16, and a bound of the root mean square of some."""


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(step: Callable[..., Tensor], inputs: Sequence[Tensor], want: Callable[..., Tensor] | None = None) -> None:
    """step(kernels, inputs...): value and gradients in bf16 are those of float64 to rounding."""
    exact = [x.double().requires_grad_() for x in inputs]
    given = [x.clone().requires_grad_() for x in inputs]
    value = want(*exact) if want else step(None, *exact)
    got = step(load(), *given)
    weight = noise(*got.shape, seed=9)
    slopes = torch.autograd.grad(value, exact, weight.double())
    ours = torch.autograd.grad(got, given, weight)
    for mine, true in zip((got, *ours), (value, *slopes), strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == true.shape
        assert (mine.double() - true).norm() <= ROUNDING * true.norm() + 1e-6, (mine, true)


@pytest.mark.parametrize("shape", [(1, 576), (5, 16), (130, 40), (3, 7, 24), (65, 1000)])
def test_norm(shape: tuple[int, ...]) -> None:
    check(lambda k, x, w: ops.rms_norm(x, w, 1e-5, k), [noise(*shape), noise(shape[-1], seed=1)])


@pytest.mark.parametrize("shape", [(1, 16), (3, 70), (100, 1536), (1, 5)])
def test_gate(shape: tuple[int, ...]) -> None:
    def step(k: Kernels | None, gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu_mul(gate * 8, up, k)

    check(step, [noise(*shape), noise(*shape, seed=1)])


@pytest.mark.parametrize("dim", [8, 32, 64, 96])
def test_rotate(dim: int) -> None:
    angle = torch.arange(20)[:, None, None] * torch.linspace(0.1, 1, dim // 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    check(lambda k, x: ops.rotate(x, cos.to(x.dtype), sin.to(x.dtype), k), [noise(20, 3, dim)])


def attention(blocks: list[Block], window: int | None) -> Callable[..., Tensor]:
    return lambda k, *qkv: PackedAttention(Plan.of(blocks), lambda layer: window, k)(0, *qkv)


@settings(max_examples=25, deadline=None)
@given(TREES, st.sampled_from([None, 1, 3, 9]))
def test_attention_over_any_tree_is_the_loop(trees: list[Tree], window: int | None) -> None:
    blocks = blocks_of(trees)
    size = sum(b.length for b in blocks)
    inputs = [noise(size, heads, 16, seed=heads + i) for i, heads in enumerate((4, 2, 2))]
    check(attention(blocks, window), inputs, lambda *qkv: loop_attention(blocks, *qkv, window))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    "blocks",
    [
        [Block(0, 49), Block(49, 130), Block(179, 1)],
        [Block(0, 300)],
        [Block(0, 94, (6, 1, 9)), Block(110, 20, (70, 60))],
        [Block(0, 80, (14, 2, 20, 1) * 4, tuple(n for g in range(4) for n in (0, *[1 + 4 * g] * 3)))],
    ],
)
@pytest.mark.parametrize("heads,groups,dim", [(9, 3, 64), (2, 2, 80), (4, 1, 128)])
def test_attention_of_real_sizes(blocks: list[Block], window: int | None, heads: int, groups: int, dim: int) -> None:
    size = sum(b.length for b in blocks)
    inputs = [noise(size, n, dim, seed=i) for i, n in enumerate((heads, groups, groups))]
    check(attention(blocks, window), inputs)


def test_attention_does_not_depend_on_the_number_of_threads() -> None:
    blocks, size = [Block(0, 60, (30, 20, 9)), Block(119, 200)], 319
    inputs = [noise(size, n, 64, seed=i).requires_grad_() for i, n in enumerate((9, 3, 3))]
    seen = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            out = attention(blocks, None)(load(), *inputs)
            seen.append([out, *torch.autograd.grad(out, inputs, noise(*out.shape, seed=4))])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_not_a_number_stays_one() -> None:
    q, k, v = (noise(40, n, 16, seed=n) for n in (2, 1, 1))
    k[20] = float("nan")
    out = attention([Block(0, 40)], None)(load(), q, k, v)
    assert bool(out[:20].isfinite().all()) and bool(out[20:].isnan().all())
    z = noise(2, 50)
    z[1, 3] = float("nan")
    law = load().law(z, 1.0, True, True)
    assert law.norm.isnan().tolist() == [False, True]
    norm, _ = load().norm(z, noise(50), 1e-6)
    assert norm.isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize("vocab", [12, 16, 1003])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("asked", [(False, False), (True, True)])
def test_law_of_logits(vocab: int, temperature: float, asked: tuple[bool, bool]) -> None:
    """Rows of one state with the same target among them, and a token that is impossible."""
    table = noise(max(290, vocab), vocab) * 3
    table[:, 5] = float("-inf")
    packed = PackedInput.of(family_batch(vocab=vocab), True)
    packed = PackedInput(**{**vars(packed), "target": packed.target.where(packed.target != 5, 6)})
    inputs = [x.requires_grad_() for x in (table.clone(), table.double())]
    ours, true = Table(inputs[0]), Table(inputs[1])
    ours.kernels = load()
    found = [token_scores(t, packed, temperature, entropy=asked[0], sum_pi_squared=asked[1]) for t in (ours, true)]
    weight, grads = torch.randn(packed.num_tokens, dtype=torch.float64), []
    for (logp, entropy, squares), z in zip(found, inputs, strict=True):
        total = (logp * weight).sum() + (0 if entropy is None else (entropy * weight.sin()).sum())
        grads += torch.autograd.grad(total, [z])
        assert (entropy is not None, squares is not None) == asked
    for mine, exact in zip(*found, strict=True):
        if exact is not None:
            torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    assert (grads[0].double() - grads[1]).norm() <= 2 * ROUNDING * grads[1].norm() and bool((grads[0][:, 5] == 0).all())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_gradients_of_a_model_are_no_further_from_fp32_than_torchs(tmp_path: Path, family: str) -> None:
    folder = make_model(tmp_path / "m", family, dtype=torch.bfloat16, head_dim=16)
    batch = family_batch()
    found = []
    for cfg in (FP32, BF16.model_copy(update={"compile": "off"}), BF16):
        policy = load_policy(folder, cfg)
        logp, _ = token_logprobs(policy, PackedInput.of(batch, True), 1.0)
        logp.square().sum().backward()
        found.append((logp.detach(), torch.cat([p.grad.float().flatten() for p in policy.parameters()])))  # type: ignore[union-attr]
        assert (policy.kernels is not None) == (cfg is BF16)
    for exact, plain, mine in zip(*found, strict=True):
        assert (mine - exact).norm() <= 1.1 * (plain - exact).norm(), family


def test_compile_on_is_refused_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, on = make_model(tmp_path / "m"), {"compile": "on"}
    with pytest.raises(ConfigError, match=r"^model.compile=on: the kernels are for bfloat16 on a CPU, this is float32"):
        load_policy(folder, FP32.model_copy(update=on))
    with pytest.raises(ConfigError, match=r"^model.compile=on: the kernels are for native models, and .* on transf"):
        load_policy(folder, HF.model_copy(update=on))
    policy = load_policy(folder, BF16.model_copy(update=on))
    assert policy.kernels is load() and "compiled kernels (but for attention: head size 8" in policy.described
    assert load_value_model(folder, BF16).model.kernels is load()
    wide = load_policy(make_model(tmp_path / "w", head_dim=16), BF16)
    assert wide.described == "native implementation, compiled kernels"
    load.cache_clear()
    monkeypatch.setattr(kernels_module, "compiled", _fails)
    policy = load_policy(folder, BF16)
    assert policy.kernels is None
    assert policy.described == "native implementation, without compiled kernels (model.compile: it broke)"


def _fails(*args: object) -> None:
    raise CompileError("it broke")


def test_a_model_that_was_moved_or_cast_computes_with_torch(tmp_path: Path) -> None:
    """Kernels read memory where they are told to: a tensor of another kind must never reach them."""
    folder = make_model(tmp_path / "m", dtype=torch.bfloat16, head_dim=16)
    packed = PackedInput.of(family_batch(), True)
    with torch.no_grad():
        moved = load_policy(folder, BF16).float()
        want = token_logprobs(load_policy(folder, FP32), packed, 1.0)[0]
        torch.testing.assert_close(token_logprobs(moved, packed, 1.0)[0], want)


def test_room_does_not_follow_the_default_dtype() -> None:
    x, weight = noise(200, 64).requires_grad_(), noise(64, seed=1).requires_grad_()
    want = torch.autograd.grad(ops.rms_norm(x, weight, 1e-6, load()).sum(), [x, weight])
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        got = torch.autograd.grad(ops.rms_norm(x, weight, 1e-6, load()).sum(), [x, weight])
    finally:
        torch.set_default_dtype(default)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_what_lies_otherwise_in_memory_is_computed_all_the_same() -> None:
    both = noise(6, 80)
    gate, up = both.chunk(2, -1)
    want = ops.silu_mul(gate.contiguous(), up.contiguous(), load())
    assert torch.equal(ops.silu_mul(gate, up, load()), want)
    row = noise(1, 40)
    assert torch.equal(ops.silu_mul(both[:, :40], row, load()), ops.silu_mul(both[:, :40], row))
    weight = noise(128)[::2]
    x = noise(5, 64, seed=3)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6, load()), ops.rms_norm(x, weight.contiguous(), 1e-6, load()))
    turned = noise(7, 3, 32)
    one = noise(1, 1, 16)
    assert torch.equal(ops.rotate(turned, one, one, load()), ops.rotate(turned, one.expand(7, 1, 16), one, None))


def test_what_does_not_belong_together_is_refused() -> None:
    q, k, v = (noise(39, n, 16, seed=n) for n in (2, 1, 1))
    with pytest.raises(IndexError, match="attention of 40 tokens was given 39, 39 and 39"):
        attention([Block(0, 40)], None)(load(), q, k, v)
    z, begin = noise(3, 20), torch.arange(4)
    law = load().law(z, 1.0, False, False)
    with pytest.raises(IndexError, match="outside of the 20 of the vocabulary"):
        load().law_backward(z, 1.0, law, (torch.ones(3), torch.tensor([1, 20, 3]), begin), None)


def test_a_second_derivative_is_refused_rather_than_zero() -> None:
    gate, up = noise(4, 16).requires_grad_(), noise(4, 16, seed=1)
    (slope,) = torch.autograd.grad(ops.silu_mul(gate, up, load()).square().sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_a_policy_with_kernels_can_be_copied_and_pickled(tmp_path: Path) -> None:
    policy = load_policy(make_model(tmp_path / "m", dtype=torch.bfloat16, head_dim=16), BF16)
    packed = PackedInput.of(family_batch(), True)
    with torch.no_grad():
        want = token_logprobs(policy, packed, 1.0)[0]
        for copy in (deepcopy(policy), pickle.loads(pickle.dumps(policy))):
            assert copy.kernels is load() and torch.equal(token_logprobs(copy, packed, 1.0)[0], want)


def test_a_damaged_or_half_made_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    for damage in (None, b"", b"garbage"):
        compiler.compiled.cache_clear()
        if damage is not None:
            (made,) = (tmp_path / "verl").glob("one-*.so")
            made.unlink()
            made.write_bytes(damage)
        assert compiler.compiled("one", (source,)).one() == 1
    with ThreadPoolExecutor(3) as pool:  # no two of them in each other's way
        sources = []
        for i in range(3):
            sources.append(tmp_path / f"s{i}.cpp")
            sources[-1].write_text(f'extern "C" int one() {{ return {i}; }}')
        made = list(pool.map(lambda s: compiler.compiled(s.stem, (s,)).one(), sources))
    assert made == [0, 1, 2] and not list((tmp_path / "verl").glob(".making-*"))
    compiler.compiled.cache_clear()
    source.write_text("not C++")
    with pytest.raises(CompileError, match=r"failed on one.cpp \(.*error.*\)"):
        compiler.compiled("one", (source,))
    compiler.compiled.cache_clear()
