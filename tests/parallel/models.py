"""The tiny models of the parity checks, and what a worker needs of them without transformers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

from verl.models.config import DecoderConfig
from verl.models.source import ModelSource

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tied": True}),
    "llama_biases": ("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {"tied": False}),
    "mistral": ("mistral", {"tied": True}),
    # Nothing divides: key heads in the middle of a group, uneven vocabulary and MLP, one layer more in some stages.
    "odd": ("qwen3", {"tied": True, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 50,
                      "num_hidden_layers": 5, "vocab": 331, "attention_bias": True}),
}  # fmt: skip


class Model(NamedTuple):
    source: ModelSource
    config: DecoderConfig


def make(folder: Path) -> None:
    """Save all of them."""
    from tests.tiny import make_config, make_model

    for seed, (name, (family, options)) in enumerate(MODELS.items()):
        make_model(folder / name, family, seed=seed, **options)
        config = DecoderConfig.from_hf(make_config(family, **options))
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(config))
    make_model(folder / "judge", "qwen2", head="reward", seed=7)


def load(folder: Path, name: str) -> Model:
    config = pickle.loads((folder / f"{name}.pkl").read_bytes())
    return Model(ModelSource(folder / name, name), config)
