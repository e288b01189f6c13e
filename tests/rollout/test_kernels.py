"""The compiled kernels against plain float64 loops, and the CPU decoder against the decoder that trains."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny import has_compiler, make_model
from verl.config.models import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.core import ConfigError, RolloutError, SamplingParams
from verl.core.batch import Batch, cumulative
from verl.engines import rollout
from verl.engines.rollout import kernels, products
from verl.engines.rollout.admission import Budget
from verl.engines.rollout.attend import DecodeAttention
from verl.engines.rollout.cache import SlotCache
from verl.engines.rollout.cpu_decoder import CPUDecoder, supported
from verl.engines.rollout.sampling import Draw, sample, sample_whole
from verl.models import compiler
from verl.models.load import load_policy
from verl.models.ops import rotate
from verl.models.packed import PackedInput
from verl.models.policy import Policy

COMPILED = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(scope="module")
def compiled() -> kernels.Kernels:
    return kernels.load()


@COMPILED
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_rms_norm(compiled: kernels.Kernels, rows: int) -> None:
    x, weight = noise(rows, 3, 40)[:, 1], noise(40, seed=1)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(compiled.rms_norm(x, weight, 1e-5).double(), want, rtol=4e-3, atol=1e-3)


@COMPILED
def test_silu_mul(compiled: kernels.Kernels) -> None:
    both = noise(6, 2 * 70) * 8
    gate, up = both.double().chunk(2, -1)
    want = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(compiled.silu_mul(both).double(), want, rtol=1e-2, atol=1e-3)


@COMPILED
@pytest.mark.parametrize("dim,heads,groups", [(64, 9, 3), (32, 4, 4), (128, 8, 1), (96, 5, 1)])
@pytest.mark.parametrize("window", [0, 3])
def test_attend(compiled: kernels.Kernels, dim: int, heads: int, groups: int, window: int) -> None:
    rows, room = 4, 12
    qkv, cos, sin = noise(rows, heads + 2 * groups, dim), noise(rows, dim // 2, seed=1), noise(rows, dim // 2, seed=2)
    keys, values = noise(6, groups, room, dim, seed=3), noise(6, groups, room, dim, seed=4)
    before, positions = (keys.clone(), values.clone()), torch.tensor([0, 11, 5, 2])
    places = kernels.Places(torch.arange(rows), torch.ones(rows, dtype=torch.int64), positions)
    got = compiled.attend(qkv, cos, sin, keys, values, places, window).view(rows, heads, dim)
    turned = rotate(qkv[:, : heads + groups].contiguous(), cos[:, None], sin[:, None])
    for b, last in enumerate(positions.tolist()):
        assert torch.equal(keys[b, :, last], turned[b, heads:]) and torch.equal(values[b, :, last], qkv[b, -groups:])
        first = max(0, last - window + 1) if window else 0
        for h in range(heads):
            k, v = (x[b, h * groups // heads, first : last + 1].double().numpy() for x in (keys, values))
            score = k @ turned[b, h].double().numpy() / dim**0.5
            p = np.exp(score - score.max())
            np.testing.assert_allclose(got[b, h].double(), p / p.sum() @ v, rtol=2e-2, atol=1e-2)
        keys[b, :, last], values[b, :, last] = before[0][b, :, last], before[1][b, :, last]
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


@COMPILED
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 40])
@pytest.mark.parametrize("inputs,outputs", [(2, 1), (64, 96), (130, 49), (4098, 33), (9000, 16)])
def test_multiply(compiled: kernels.Kernels, rows: int, inputs: int, outputs: int) -> None:
    needs_products(compiled)
    x, weight, bias = noise(rows, 3, inputs)[:, 1], noise(outputs, inputs, seed=1), noise(outputs, seed=2)
    want = x.double() @ weight.double().T
    plain = compiled.multiply(x, compiled.pack([weight], [None]))
    assert_rounded(plain, want, inputs)
    assert_rounded(compiled.multiply(x, compiled.pack([weight], [bias])), want + bias.double(), inputs)
    residual = noise(rows, outputs, seed=3)
    total = compiled.multiply(x, compiled.pack([weight], [None]), residual.clone())
    torch.testing.assert_close(total, plain + residual, rtol=0, atol=0)


@COMPILED
def test_multiply_joins_weights_and_gates(compiled: kernels.Kernels) -> None:
    needs_products(compiled)
    x, parts = noise(13, 70), [noise(n, 70, seed=n) for n in (48, 16, 21)]
    got = compiled.multiply(x, compiled.pack(parts, [None] * 3))
    apart = [compiled.multiply(x, compiled.pack([w], [None])) for w in parts]
    assert torch.equal(got, torch.cat(apart, -1))
    weights, biases = [noise(48, 70, seed=n) / 3 for n in (1, 2)], [noise(48, seed=n) for n in (3, 4)]
    gate, up = (compiled.multiply(x, compiled.pack([w], [b])) for w, b in zip(weights, biases, strict=True))
    gated = compiled.multiply(x, compiled.pack(weights, biases, gated=True))
    torch.testing.assert_close(gated, compiled.silu_mul(torch.cat([gate, up], -1)), rtol=8e-3, atol=1e-5)


@COMPILED
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(compiled: kernels.Kernels) -> None:
    needs_products(compiled)
    x, weight = noise(100, 576), compiled.pack([noise(96, 576, seed=1)], [None])
    whole = compiled.multiply(x, weight)
    for rows in (1, 3, 12, 47):
        assert torch.equal(compiled.multiply(x[:rows], weight), whole[:rows])


@COMPILED
@pytest.mark.parametrize("native", [False, True])
def test_products_by_both_libraries(
    compiled: kernels.Kernels, native: bool, policies: dict[str, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever library this machine would take: the same product."""
    if native:
        needs_products(compiled)
    monkeypatch.setattr(products, "amx", lambda: not native)
    mlp = policies["llama"].decoder.layers[0].mlp
    layout = products.Layout(compiled, pack=True)
    gated, down = layout.gated(mlp.gate_proj, mlp.up_proj), layout.of((mlp.down_proj,))  # type: ignore[arg-type]
    assert isinstance(gated, products.Native) == isinstance(down, products.Native) == native
    x, residual = noise(5, 128), noise(5, 128, seed=1)
    with torch.no_grad():
        want = residual + mlp(x)  # type: ignore[operator]
    torch.testing.assert_close(down.onto(gated(x), residual.clone()), want, rtol=0.02, atol=0.02)


def needs_products(compiled: kernels.Kernels) -> None:
    if not compiled.multiplies:
        pytest.skip("this processor has no AVX512-BF16")


def assert_rounded(got: Tensor, want: Tensor, inputs: int) -> None:
    """Within a rounding to bf16 and what fp32 sums of so many terms lose."""
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6 * inputs)


@COMPILED
@pytest.mark.parametrize("vocab", [1, 255, 256, 1000, 5003])
def test_draw_is_the_law_of_the_plain_sampler(compiled: kernels.Kernels, vocab: int) -> None:
    logits = noise(40, vocab) * 3
    banned = [(i % vocab,) if vocab > 1 else () for i in range(40)]
    params = [SamplingParams(temperature=0.5 + i / 20, seed=i) for i in range(40)]
    draws = [Draw(str(i), params[i], i, banned[i]) for i in range(40)]
    ids, logps = sample_whole(logits.clone(), draws, compiled)
    want, want_logps = sample(logits, draws)
    assert sum(a != b for a, b in zip(ids, want, strict=True)) <= 1  # a uniform number at the very edge of a token
    for a, b, x, y in zip(ids, want, logps, want_logps, strict=True):
        assert a != b or x == pytest.approx(y, abs=2e-5)
    assert all(i not in d.banned for i, d in zip(ids, draws, strict=True))


@COMPILED
def test_draw_at_the_ends_of_the_unit_interval(compiled: kernels.Kernels) -> None:
    logits = torch.full((2, 700), -200.0).bfloat16()
    logits[:, 300:303] = 1.0
    ids, logps = compiled.draw(logits, torch.ones(2), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ids.tolist() == [300, 302]
    torch.testing.assert_close(logps, torch.full((2,), -(3.0**0)).mul(np.log(3.0)))


@COMPILED
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_draw_names_the_request_whose_logits_are_not_finite(compiled: kernels.Kernels, bad: float) -> None:
    logits = noise(3, 50)
    logits[1, 7] = bad
    with pytest.raises(RolloutError, match="request 'b': the model's logits are not finite"):
        sample_whole(logits, [Draw(n, SamplingParams(), 0) for n in "abc"], compiled)
    logits = torch.full((2, 9), float("-inf"), dtype=torch.bfloat16)
    logits[:, 4] = 1.0
    params = SamplingParams(min_tokens=1)
    with pytest.raises(RolloutError, match=r"request 'b': nothing can be drawn.*min_tokens"):
        sample_whole(logits, [Draw("a", params, 1), Draw("b", params, 0, banned=(4,))], compiled)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    folder = tmp_path_factory.mktemp("policies")
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    made = {f: make_model(folder / f, f, tied=f != "qwen2", dtype=torch.bfloat16, **shape) for f in FAMILIES}
    return {f: load_policy(p, ModelConfig(dtype="bfloat16")) for f, p in made.items()}  # type: ignore[misc]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=COMPILED)])
@pytest.mark.parametrize("family", FAMILIES)
def test_cpu_decoder_gives_what_the_decoder_gives(
    policies: dict[str, Policy], family: str, compile: bool, pack: bool
) -> None:
    """Several steps from an empty cache: hidden states and logits, against fp32 within what bf16 rounds."""
    policy = policies[family]
    if not supported(policy):
        pytest.skip("this CPU has no bf16 products")
    config = policy.decoder.config
    body = CPUDecoder(policy, kernels.load() if compile else None, pack)
    assert (body.kernels is not None) == compile
    caches = [
        SlotCache(
            config.num_layers, config.num_kv_heads, config.head_dim, Budget(3, 1), torch.bfloat16, torch.device("cpu")
        )
        for _ in range(2)
    ]
    with torch.no_grad():
        for step in range(9):
            ids, at = torch.tensor([5, 70 + step, 200 - step]), torch.full((3,), step)
            hidden = []
            for cache, decoder in zip(caches, (body, policy.decoder), strict=True):
                cache.reserve(3, step + 1, 9, 3 if step else 0, step)
                hidden.append(decoder(ids, at, DecodeAttention(cache, at, step + 1, config.window)))
            torch.testing.assert_close(hidden[0].float(), hidden[1].float(), rtol=0.05, atol=0.08)
            close = (body.logits(hidden[1]).float() - policy.logits(hidden[1]).float()).abs()
            assert float(close.max()) < 0.03


@COMPILED
@pytest.mark.parametrize("tokens", [4, 40])
def test_engine_follows_the_weights_and_drops_the_packed_copy(policies: dict[str, Policy], tokens: int) -> None:
    """Short bursts decode on the policy's own weights, long ones on a copy: both must be those of the last commit."""
    policy = policies["qwen2"]
    if not supported(policy):
        pytest.skip("this CPU has no bf16 products")
    engine = rollout.attach("native", policy, rollout_config("on"))
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, seed=3)
    engine.generate([[5, 6, 7]], params)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.05)
    engine.commit(1)
    (done,) = engine.generate([[5, 6, 7]], params)
    assert engine._packed is None and engine.described == "compiled kernels"
    ids = [5, 6, 7]
    for token, logp in zip(done.token_ids, done.logprobs, strict=True):
        law = plain_law(policy, ids)
        assert logp == pytest.approx(float(law[token]), abs=0.1)
        ids.append(token)


def rollout_config(compile: str) -> RolloutConfig:
    return RolloutConfig(max_sequences=4, compile=compile)  # type: ignore[arg-type]


def plain_law(policy: Policy, ids: list[int]) -> Tensor:
    """log-probs [V] of the next token, from a forward of the whole sequence without any cache."""
    mask = torch.tensor([False] * len(ids) + [True])
    batch = Batch(cumulative(torch.tensor([len(ids) + 1])), {"token_ids": torch.tensor([*ids, 0]), "loss_mask": mask})
    packed = PackedInput.of(batch, False)
    with torch.no_grad():
        features = policy.features(packed).index_select(0, packed.pred)
        return torch.log_softmax(policy.logits(features)[0].float(), -1)


def test_compile_on_is_refused_where_it_cannot_be_and_auto_says_why(
    policies: dict[str, Policy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "fp32")
    with pytest.raises(ConfigError, match=r"^rollout.compile=on: the kernels are for bfloat16"):
        rollout.load("native", folder, dtype="float32", device="cpu", compile="on")
    if not supported(policies["llama"]):
        pytest.skip("this CPU has no bf16 products")

    def both(reason: str) -> None:
        _forget()
        with pytest.raises(ConfigError, match=rf"^rollout.compile=on: {reason}.*; set auto or off$"):
            rollout.attach("native", policies["llama"], rollout_config("on"))
        said = rollout.attach("native", policies["llama"], rollout_config("auto")).described
        assert re.fullmatch(rf"without compiled kernels \(rollout.compile: {reason}.*\)", said), said

    with monkeypatch.context() as here:
        here.setattr(compiler.shutil, "which", lambda name: None)
        here.delenv("CXX", raising=False)
        both(r"no C\+\+ compiler here")
        here.setenv("CXX", "/nowhere/c++ -x")
        both("the environment variable CXX names /nowhere/c")
    with monkeypatch.context() as here:
        here.setenv("XDG_CACHE_HOME", str(tmp_path))
        here.setenv("CXX", "/bin/false")
        both("/bin/false failed on decode.cpp")
        here.setenv("CXX", "env true")
        both("env failed on decode.cpp")
        (tmp_path / "file").touch()
        here.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        both("what is compiled cannot be kept or loaded")
    _forget()


def _forget() -> None:
    kernels.load.cache_clear()
    compiler.compiled.cache_clear()
