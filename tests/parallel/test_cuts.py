"""The pure side of tensor and pipeline parallelism: every element is held, counted once, and heads read their keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.core.errors import ModelError
from verl.engines.train.holding import Holding
from verl.models.config import DecoderConfig
from verl.models.cuts import Cuts, Share, Stage
from verl.models.policy import Policy
from verl.models.rope import RopeConfig


def shape(heads: int = 4, keys: int = 2, inner: int = 48, vocab: int = 300, **more: Any) -> DecoderConfig:
    values: dict[str, Any] = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": 32, "intermediate_size": inner, "num_layers": 3,
        "num_heads": heads, "num_kv_heads": keys, "head_dim": 8, "rms_eps": 1e-6, "tied": False, "qkv_bias": True,
        "o_bias": True, "mlp_bias": True, "qk_norm": True, "windows": (None,) * 3, "max_positions": 64,
        "rope": RopeConfig("default", 10000.0, 8, 64),
    }  # fmt: skip
    return DecoderConfig(**(values | more))


@pytest.mark.parametrize("size", range(1, 9))
def test_each_query_head_reads_its_key_head(size: int) -> None:
    for keys in range(1, 9):
        for group in range(1, 6):
            if keys * group < size:
                continue
            cuts = Cuts(shape(keys * group, keys), size)
            seen = []
            for heads in cuts.heads:
                reads = range(len(heads.keys)) if heads.reads is None else heads.reads
                run, rest = divmod(len(heads.queries), len(reads))
                assert rest == 0 and len(reads) == heads.num_read <= cuts.cached_heads
                for i, query in enumerate(heads.queries):
                    assert heads.keys[reads[i // run]] == query // group
                assert set(reads) == set(range(len(heads.keys)))
                seen += heads.queries
            assert seen == list(range(keys * group))
            assert cuts.shares_keys == (sum(len(h.keys) for h in cuts.heads) > keys)
            assert keys % size != 0 or (not cuts.shares_keys and all(h.reads is None for h in cuts.heads))


@pytest.mark.parametrize(("heads", "keys"), [(4, 2), (6, 3), (9, 3), (8, 1), (4, 4)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_cover_each_parameter_and_are_owned_once(heads: int, keys: int, size: int) -> None:
    config = shape(heads, keys, inner=50, vocab=301)
    cuts = Cuts(config, size)
    whole = dict(Policy(config, None).named_parameters())  # type: ignore[arg-type]
    for name, param in whole.items():
        values = torch.arange(param.numel()).view(param.shape)
        owned = []
        for rank in range(size):
            part = cuts.part(name, rank)
            local = values if part is None else part.of(values)
            owned.append(cuts.owned(name, local, rank).flatten())
            if part is not None:
                assert part.fits(param.shape) and part.whole_shape(local.shape) == param.shape
                assert torch.equal(values[part.index], local) and local.numel() > 0
        assert torch.equal(torch.cat(owned).sort().values, values.flatten()), name
    assert size == 1 or cuts.part("model.layers.0.self_attn.o_proj.bias", 0) is None


def test_dimensions_of_the_cuts() -> None:
    cuts = Cuts(shape(), 2)
    dims = {
        "q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1,
    }  # fmt: skip
    for name, dim in dims.items():
        part = cuts.part(f"layers.1.x.{name}.weight", 1)
        assert part is not None and part.dim == dim
    for name in ("model.norm", "layers.0.input_layernorm", "layers.0.self_attn.q_norm", "score"):
        assert cuts.part(f"{name}.weight", 1) is None
    last = Cuts(shape(vocab=301, inner=50), 4).part("lm_head.weight", 3)
    assert last is not None and (last.start, last.stop) == (228, 301)


@pytest.mark.parametrize("options", [{"heads": 3, "keys": 3}, {"inner": 5}, {"vocab": 3}])
def test_too_many_ranks_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=r"parallel\.\*\.tp: 4 ranks are too many for [35] .*; set tp to 3 or less"):
        Cuts(shape(**options), 4)
    Cuts(shape(**options), 3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", range(1, 9))
def test_stages(layers: int, tied: bool) -> None:
    config = shape(num_layers=layers, windows=(None,) * layers, tied=tied)
    whole = dict(Policy(config, None).named_parameters())  # type: ignore[arg-type]
    for count in range(1, layers + 1):
        stages = [Stage(i, count, layers) for i in range(count)]
        assert [i for stage in stages for i in stage.layers] == list(range(layers))
        assert all(i * count // layers == stage.number for stage in stages for i in stage.layers)
        held = [[n for n in whole if stage.holds(n, tied)] for stage in stages]
        twice = ["model.embed_tokens.weight"] if tied and count > 1 else []
        assert sorted(n for names in held for n in names) == sorted([*whole, *twice])
        counted = [n for s, names in zip(stages, held, strict=True) for n in names if _owns(s, tied, n)]
        assert sorted(counted) == sorted(whole)
    with pytest.raises(ModelError, match=rf"parallel\.\*\.pp: {layers + 1} stages are too many for {layers} layers"):
        Stage(0, layers + 1, layers)


def _owns(stage: Stage, tied: bool, name: str) -> bool:
    return Holding(Share(stage, None, 0, tied)).owned(name, torch.ones(2)) == ((0, 2),)
