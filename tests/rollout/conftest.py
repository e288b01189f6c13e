"""Fixtures: one tiny model of each family, and engines of each backend on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.rollout import tiny
from verl.engines import rollout

BACKENDS = ("native", "hf")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str = "llama") -> Path:
        if family not in made:
            made[family] = tiny.save(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def reference(folders: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' module of a family, in fp32."""
    return lambda family="llama": AutoModelForCausalLM.from_pretrained(folders(family)).eval()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(backend: str, folders: Callable[[str], Path]) -> Callable[..., Any]:
    """An engine of the backend under test, fp32 on CPU."""

    def engine(family: str = "llama", **options: Any) -> Any:
        return rollout.load(backend, folders(family), dtype="float32", device="cpu", **options)

    return engine
