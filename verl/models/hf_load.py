"""transformers modules from a source: the one place that calls `from_pretrained` for weights."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from verl.core.errors import ModelError
from verl.models.config import NATIVE_TYPES
from verl.models.source import LoadedSource, ModelSource, first_line

Kind = Literal["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"]


def hf_module(source: ModelSource, kind: Kind, dtype: torch.dtype, device: torch.device | str) -> Any:
    """The module in eval mode; of a module that the user loaded, a copy, since roles must not share what is trained.

    ModelError where the files cannot be read or lack weights that `kind` needs.
    """
    if isinstance(source, LoadedSource):
        module = source.module.base_model if kind == "AutoModel" else source.module
        return copy.deepcopy(module).to(device=device, dtype=dtype).eval()
    try:
        module, info = _load(source, kind, dtype)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as e:
        raise ModelError(f"{source.name}: transformers cannot load it as {kind} ({first_line(e)})") from e
    missing = sorted(info["missing_keys"])
    if missing and kind != "AutoModel":
        raise ModelError(
            f"{source.name}: weight {missing[0]!r} is missing ({len(missing)} in all) for {kind}; "
            "point the path at a complete model of this kind"
        )
    return module.to(device).eval()


def _load(source: ModelSource, kind: Kind, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    import transformers

    auto = getattr(transformers, kind)
    if not source.is_gguf:
        loaded = auto.from_pretrained(source.folder, dtype=dtype, output_loading_info=True, **source.load_args)
        return loaded[0], loaded[1]
    if source.gguf.architecture in NATIVE_TYPES:
        state = {name: tensor.to(dtype) for name, tensor in source.tensors()}
        config = source.hf_config()
        with torch.device("meta"):
            model_class = type(auto.from_config(config))
        loaded = model_class.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
        return loaded[0], loaded[1]
    from transformers.utils.quantization_config import GgufConfig

    plain = GgufConfig(dequantize=True)
    module, info = auto.from_pretrained(
        source.folder, dtype=dtype, quantization_config=plain, output_loading_info=True, **source.load_args
    )
    del module.config.quantization_config  # the weights are plain now
    return module, info
