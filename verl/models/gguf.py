"""GGUF files of Llama, Mistral, Qwen2 and Qwen3 models: metadata and weights, read straight from the mapped file.

Format: the GGUF specification, version 2 and 3 (ggml repository, docs/gguf.md). transformers reads these files too, but
parses the vocabulary several times and searches a name table once per module, which costs ten times as long.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.core.errors import MissingDependency, ModelError

_SCALAR = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """metadata: key to value (long string arrays as their length). Tensors are read when asked for."""

    def __init__(self, path: Path):
        self.path = path
        if path.stat().st_size < 24:
            raise ModelError(f"{path}: not a GGUF file; give a model folder or a file that starts with GGUF")
        with open(path, "rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        reader = _Reader(view, path)
        self.metadata, self._infos, self._data_start = reader.read()
        self._bytes = np.frombuffer(view, dtype=np.uint8)

    @property
    def architecture(self) -> str:
        """`model_type` in Hugging Face's terms."""
        arch = str(self.metadata.get("general.architecture"))
        named = str(self.metadata.get("general.name", "")).lower()
        return "mistral" if arch == "llama" and "mistral" in named else arch

    @cached_property
    def _prefix(self) -> str:
        return str(self.metadata["general.architecture"]) + "."

    def _get(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(self._prefix + key, default)
        if value is None:
            raise ModelError(f"{self.path}: this GGUF file has no {self._prefix + key}; it is not a language model's")
        return value

    def config_values(self) -> dict[str, Any]:
        """The Hugging Face config of a model of a native family. ModelError on what it cannot express exactly."""
        names = {info.name for info in self._infos}
        if "rope_freqs.weight" in names:
            raise ModelError(
                f"{self.path}: its rotary frequencies are a table (rope_freqs.weight) that no config can express; "
                "use the model's safetensors folder instead"
            )
        heads, width = self._get("attention.head_count"), self._get("embedding_length")
        values = {
            "vocab_size": self._vocab_size(),
            "hidden_size": width,
            "intermediate_size": self._get("feed_forward_length"),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": self._get("attention.key_length", self._get("rope.dimension_count", width // heads)),
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in names,
        }
        if self.architecture == "qwen2" and values["head_dim"] == width // heads:
            del values["head_dim"]  # not a field of this family's config
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            values[f"{role}_token_id"] = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        window = self.metadata.get(self._prefix + "attention.sliding_window")
        if window or self.architecture == "mistral":
            values["sliding_window"] = window or None
        return values

    def _vocab_size(self) -> int:
        return int(next(info.shape[0] for info in self._infos if info.name == "token_embd.weight"))

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(self._get("rope.freq_base", 10000.0))}
        kind = self.metadata.get(self._prefix + "rope.scaling.type", "none")
        if kind in ("none", ""):
            return rope
        if kind not in ("linear", "yarn"):
            raise ModelError(f"{self.path}: rope scaling {kind!r} is not known for GGUF; use the safetensors folder")
        rope |= {"rope_type": kind, "factor": float(self._get("rope.scaling.factor"))}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self._get("rope.scaling.original_context_length")
        return rope

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, fp32 tensor) of each weight, unpacked one at a time."""
        for info in self._infos:
            name = _hf_name(info.name)
            if name is None:
                raise ModelError(f"{self.path}: unknown tensor {info.name!r} for a {self.architecture} model")
            tensor = self._read(info)
            if self.metadata["general.architecture"] == "llama":
                tensor = self._unpermute(info.name, tensor)
            yield name, tensor

    def _unpermute(self, name: str, tensor: Tensor) -> Tensor:
        """llama.cpp pairs rotary elements 2i, 2i+1; Hugging Face pairs i, i + d/2."""
        for part, key in (("attn_q.", "head_count"), ("attn_k.", "head_count_kv")):
            if f".{part}" in name:
                heads = self._get(f"attention.{key}")
                pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
                return pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def _read(self, info: _TensorInfo) -> Tensor:
        gguf = _gguf_package()
        kind = gguf.GGMLQuantizationType(info.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = (*info.shape[:-1], info.shape[-1] // block * size)
        start = self._data_start + info.offset
        raw = self._bytes[start : start + int(np.prod(rows))]
        if len(raw) < np.prod(rows):
            raise ModelError(f"{self.path}: the file ends before tensor {info.name!r}; download it again")
        raw = raw.reshape(rows)
        return torch.from_numpy(np.ascontiguousarray(_floats(gguf, raw, kind)))


def _floats(gguf: Any, raw: np.ndarray, kind: Any) -> np.ndarray:
    if kind == gguf.GGMLQuantizationType.F32:
        return np.array(raw).view(np.float32)
    try:
        return np.asarray(gguf.quants.dequantize(raw, kind), dtype=np.float32)
    except NotImplementedError as e:
        raise ModelError(f"GGUF blocks of type {kind.name} cannot be unpacked; use another quantization") from e


def _hf_name(name: str) -> str | None:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in _TENSOR_NAMES:
        return None
    stem = _TENSOR_NAMES[match[2]]
    return f"{stem}.{match[3]}" if match[1] is None else f"model.layers.{match[1]}.{stem}.{match[3]}"


def _gguf_package() -> Any:
    try:
        import gguf
    except ImportError as e:
        raise MissingDependency("reading a .gguf model needs the package gguf: pip install gguf") from e
    return gguf


class _Reader:
    """One pass over the header."""

    def __init__(self, view: memoryview, path: Path):
        self.view, self.path, self.at = view, path, 0

    def read(self) -> tuple[dict[str, Any], list[_TensorInfo], int]:
        try:
            return self._read()
        except (struct.error, IndexError, UnicodeDecodeError, KeyError) as e:
            raise ModelError(f"{self.path}: damaged GGUF header; download the file again") from e

    def _read(self) -> tuple[dict[str, Any], list[_TensorInfo], int]:
        if bytes(self.view[:4]) != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file; give a model folder or a file that starts with GGUF")
        self.at = 4
        version, tensors, pairs = self._unpack("<I"), self._unpack("<Q"), self._unpack("<Q")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version}, known are 2 and 3")
        metadata = {}
        for _ in range(pairs):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I"))
        infos = [self._info() for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        return metadata, infos, (self.at + align - 1) // align * align

    def _unpack(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.view, self.at)
        self.at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._unpack("<Q")
        self.at += length
        return bytes(self.view[self.at - length : self.at]).decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALAR[kind])
        inner, count = self._unpack("<I"), self._unpack("<Q")
        if inner == _STRING:
            for _ in range(count):
                length = self._unpack("<Q")
                self.at += length
            return count
        form = f"<{count}{_SCALAR[inner][1]}"
        values = struct.unpack_from(form, self.view, self.at)
        self.at += struct.calcsize(form)
        return list(values)

    def _info(self) -> _TensorInfo:
        name = self._string()
        dims = [self._unpack("<Q") for _ in range(self._unpack("<I"))]
        return _TensorInfo(name, tuple(reversed(dims)), self._unpack("<I"), self._unpack("<Q"))
