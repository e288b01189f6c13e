"""Who may import whom, read from the source: the table of docs/architecture.md as a test."""

import pytest

from tests.arch.imports import PACKAGE, Import, all_imports, imports_of

BASE = {"core", "config"}
MAY_IMPORT = {
    "core": set(),
    "config": {"core"},
    "algos": BASE,
    "data": BASE,
    "rewards": BASE,
    "parallel": BASE,
    "utils": BASE,
    "models": BASE | {"parallel"},
    "weights": BASE | {"parallel"},
    "controller": BASE | {"parallel"},
    "engines": BASE | {"models", "weights", "parallel", "data", "utils", "checkpoint"},
    "checkpoint": BASE | {"weights"},
    "workers": BASE | {"engines", "checkpoint", "algos", "weights", "controller", "models", "parallel", "utils"},
}
BELOW_TRAINER = set(MAY_IMPORT)
MAY_IMPORT["trainer"] = BELOW_TRAINER
MAY_IMPORT["cli"] = BELOW_TRAINER | {"trainer"}

ONLY = {
    ("controller", "parallel"): ("verl.parallel.layout",),
    ("engines", "checkpoint"): ("verl.checkpoint.sharded",),
    ("workers", "checkpoint"): ("verl.checkpoint.sharded",),
    ("engines", "data"): ("verl.data.packing",),
    ("engines", "utils"): ("verl.utils.flops", "verl.utils.monitoring"),
    ("workers", "utils"): ("verl.utils.timing",),
}
"""Where a layer may read some modules of another, not all of it."""

HOMES = {
    "ray": ("verl/controller/executors/ray.py",),
    "vllm": ("verl/engines/rollout/vllm",),
    "wandb": ("verl/utils/tracking/wandb.py",),
    "mlflow": ("verl/utils/tracking/mlflow.py",),
    "trackio": ("verl/utils/tracking/trackio.py",),
    "tensorboard": ("verl/utils/tracking/tensorboard.py",),
    "torch.utils.tensorboard": ("verl/utils/tracking/tensorboard.py",),
    "reasoning_gym": ("verl/data/gym.py", "verl/rewards/"),
    "math_verify": ("verl/rewards/",),
    "datasets": ("verl/data/hub.py",),
    "gguf": ("verl/models/gguf.py",),
    "transformers": ("verl/models/", "verl/engines/rollout/hf"),
}
"""Outside library to the only places that import it (a prefix ends a family of files)."""

ONE_FILE = ("ray", "vllm", "wandb", "mlflow", "trackio", "tensorboard", "torch.utils.tensorboard", "datasets", "gguf")


def _package(file: str) -> str | None:
    """`verl/data/load.py` is in `data`; `verl/__init__.py` in none."""
    parts = file.split("/")
    return parts[1] if len(parts) > 2 else None


def _target(found: Import) -> str | None:
    parts = found.module.split(".")
    return parts[1] if parts[0] == "verl" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else None


def forbidden(found: Import) -> str | None:
    """Why this import is against the layers, or None."""
    here, there = _package(found.file), _target(found)
    if here is None or there is None or here == there:
        return None
    if there not in MAY_IMPORT[here]:
        return f"{found.file}: verl.{here} may not import {found.module}"
    only = ONLY.get((here, there))
    if only is not None and not any(_uses(found.module, module) for module in only):
        return f"{found.file}: verl.{here} may import only {', '.join(only)} of verl.{there}, not {found.module}"
    return None


def _uses(module: str, library: str) -> bool:
    return f"{module}.".startswith(f"{library}.")


def test_every_package_is_in_the_table() -> None:
    packages = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert packages == set(MAY_IMPORT)


def test_the_table_has_no_cycle() -> None:
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [name for name, below in MAY_IMPORT.items() if name not in order and below <= set(order)]
        assert free, f"cycle among {set(MAY_IMPORT) - set(order)}"
        order += free


def test_layers_import_downwards_only() -> None:
    faults = [why for found in all_imports() if (why := forbidden(found))]
    assert not faults, "\n".join(faults)


def test_package_root_imports_nothing() -> None:
    assert imports_of(PACKAGE / "__init__.py") == []


@pytest.mark.parametrize("library", sorted(HOMES))
def test_outside_library_stays_in_its_place(library: str) -> None:
    users = {found.file for found in all_imports() if _uses(found.module, library)}
    strays = {file for file in users if not file.startswith(HOMES[library])}
    assert not strays, f"{library} belongs to {HOMES[library]}, but {sorted(strays)} import it"
    if library in ONE_FILE:
        assert len(users) <= 1, f"{library} is imported in {sorted(users)}"


def test_the_rules_can_fail() -> None:
    assert forbidden(Import("verl/data/x.py", "verl.models.policy", False))
    assert forbidden(Import("verl/core/x.py", "verl.config", False))
    assert forbidden(Import("verl/engines/x.py", "verl.data.load", False))
    assert not forbidden(Import("verl/engines/x.py", "verl.data.packing", False))
    assert not forbidden(Import("verl/trainer/x.py", "verl.models.policy", False))


def test_imports_inside_functions_are_seen() -> None:
    assert any(found.module == "wandb" for found in imports_of(PACKAGE / "utils" / "tracking" / "wandb.py"))
    typing_only = [found for found in imports_of(PACKAGE / "core" / "protocols.py") if found.typing_only]
    assert {"torch", "verl.core.batch"} <= {found.module for found in typing_only}
