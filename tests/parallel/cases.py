"""What every layout trains in the tests of parallel training, and how its sequences lie on ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.models.helpers import family_batch
from verl.algos.algorithm import Algorithm
from verl.algos.presets import preset_values
from verl.config import RunConfig, resolve
from verl.core.batch import Batch
from verl.models.load import load_policy, load_value_model
from verl.parallel.layout import Layout
from verl.parallel.mesh import Mesh
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.update_plan import UpdatePlan

LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(dp=2),
    "dp4": Layout(dp=4),
    "fsdp2": Layout(dp=2, fsdp=2),
    "fsdp4": Layout(dp=4, fsdp=4),
    "hsdp": Layout(dp=4, fsdp=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "dp2tp2": Layout(dp=2, tp=2),
    "fsdp2tp2": Layout(dp=2, tp=2, fsdp=2),
    "pp2tp2": Layout(pp=2, tp=2),
    "fsdp2pp2": Layout(dp=2, pp=2, fsdp=2),
}
STAGES = (
    *((x,) for x in LAYOUTS if LAYOUTS[x].world == 4),
    ("dp2", "fsdp2"),
    ("tp2", "pp2"),
)
"""Layouts that run at the same time, on as many of four processes each as they need."""
OWNERS = {1: (0,), 2: (0, 0, 0, 1), 4: (0, 0, 1, 0, 2)}
"""Data rank of sequence i, again from the start where the list ends: uneven, and the last of four has none."""
STEPS = 5


@dataclass(frozen=True)
class Subject:
    """A model in a role. model: folder under the test's; policy_loss: the preset's where it is ""."""

    role: str
    model: str
    implementation: str
    dtype: str = "float32"
    checkpointing: bool = False
    policy_loss: str = ""

    def config(self) -> RunConfig:
        optim = {"lr": 4e-3, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
        loss = {"name": self.policy_loss, "cov_ratio": 0.2} | ({"cov_low": -2.0} if "clip" in self.policy_loss else {})
        tree = {
            "model": {"dtype": self.dtype, "implementation": self.implementation},
            "algorithm": {"name": "ppo", "entropy_coef": 0.01, "kl": {"coef": 0.01}}
            | ({"policy_loss": loss} if self.policy_loss else {}),
            "actor": {"optim": optim},
            "critic": {"optim": optim},
            "update": {
                "epochs": STEPS,
                "micro_batch_tokens": 150,
                "activation_checkpointing": self.checkpointing,
            },
        }
        return resolve([tree], preset_values())

    def worker(self, folder: Path, mesh: Mesh) -> Any:
        cfg = self.config()
        if self.role == "actor":
            policy = load_policy(folder / self.model, cfg.model, "cpu", mesh.tensor(), mesh.pipeline())
            return ActorWorker(policy, cfg, Algorithm(cfg), "cpu", STEPS, mesh)
        model = load_value_model(folder / self.model, cfg.model, "cpu", 0, mesh.tensor(), mesh.pipeline())
        if hasattr(model, "score"):  # in the last stage
            torch.nn.init.normal_(model.score.weight, std=0.2, generator=torch.Generator().manual_seed(3))
        return CriticWorker(model, cfg, "cpu", STEPS, mesh)


SUBJECTS = {
    "actor": Subject("actor", "tied", "native"),
    "actor_checkpointed": Subject("actor", "untied", "native", checkpointing=True),
    "actor_transformers": Subject("actor", "tied", "transformers"),
    "critic": Subject("critic", "tied", "native"),
    "critic_transformers": Subject("critic", "untied", "transformers", checkpointing=True),
    "actor_bf16": Subject("actor", "tied", "native", dtype="bfloat16"),
    "actor_clip_cov": Subject("actor", "tied", "native", policy_loss="clip_cov"),
    "actor_kl_cov": Subject("actor", "tied", "native", policy_loss="kl_cov"),
}

DATA = [x for x in LAYOUTS if LAYOUTS[x].tp == LAYOUTS[x].pp == 1]
"""Layouts of the data axis alone, in which any model trains."""
CUT = [x for x in LAYOUTS if x not in DATA]
SUBJECTS_OF = {
    **dict.fromkeys(("one", "fsdp4"), tuple(SUBJECTS)),
    "fsdp2": tuple(s for s in SUBJECTS if "cov" not in s),
    "dp2": ("actor", "actor_transformers", "critic", "critic_transformers"),
    "dp4": ("actor", "actor_clip_cov", "critic"),
    "hsdp": ("actor", "critic_transformers"),
    **dict.fromkeys(CUT, ("actor", "critic")),
    **dict.fromkeys(("fsdp2tp2", "pp2tp2"), ("actor", "actor_checkpointed", "critic")),
    "dp2tp2": ("actor", "actor_clip_cov", "critic"),
    "fsdp2pp2": ("actor", "actor_kl_cov", "critic"),
}
CASES = [(x, s) for x in LAYOUTS for s in SUBJECTS_OF[x]]
"""(layout, subject): all where weights are gathered; native actor and critic wherever a model is cut."""


def whole_batch() -> Batch:
    """Sequences of many lengths with what a loss reads drawn at random, off the policy of now."""
    batch = family_batch()
    g = torch.Generator().manual_seed(1)

    def noise(scale: float, shift: float = 0.0) -> torch.Tensor:
        return torch.randn(batch.num_tokens, generator=g) * scale + shift

    names = {"advantages": (1.0, 0.0), "values": (0.5, 0.0), "returns": (1.0, 0.3)}
    names |= dict.fromkeys(("rollout_logprobs", "old_logprobs", "ref_logprobs"), (0.3, -5.5))
    return batch.with_(**{name: noise(*how) for name, how in names.items()})


def mine(batch: Batch, mesh: Mesh) -> list[int]:
    """Sequences of this rank."""
    owners = OWNERS[mesh.layout.dp]
    return [i for i in range(batch.num_seqs) if owners[i % len(owners)] == mesh.coord.dp]


def plans(subject: Subject, batch: Batch, index: list[int]) -> list[UpdatePlan]:
    """One plan an optimizer step, of the sequences `index`; divided by counts of all of them."""
    at = {seq: place for place, seq in enumerate(index)}
    out = []
    for mini in UpdatePlan.of(batch, subject.config().update, seed=5, step=3).minibatches:
        here = [(at[i], place) for place, i in enumerate(mini.index) if i in at]
        local, places = tuple(i for i, _ in here), tuple(place for _, place in here)
        out.append(UpdatePlan((replace(mini, index=local, places=places),)))
    return out
