"""Four processes that train the cases in every layout: `python -m tests.parallel.ranks FOLDER`.

FOLDER holds the models `tied` and `untied`; each rank of each layout leaves LAYOUT-RANK.pt there. Everything is
imported once, and the world of one runs, before the processes part.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.cases import CASES, LAYOUTS, STAGES, SUBJECTS, Subject, mine, plans, whole_batch
from verl.controller.dispatch import THREE_D
from verl.core.batch import Batch
from verl.engines.train.memory import state_bytes
from verl.models import logprobs
from verl.models.kernels import Kernels
from verl.parallel.mesh import SINGLE, Mesh
from verl.parallel.parts import is_cut, part
from verl.weights.boxes import Box

PATIENCE = timedelta(seconds=60)


def train(subject: Subject, name: str, folder: Path, mesh: Mesh) -> dict[str, Any]:
    """What a rank saw of the steps of one subject, and what it holds after them."""
    worker, batch = subject.worker(folder, mesh), whole_batch()
    index = mine(batch, mesh)
    local, seen = batch.take(index), {"index": index, "steps": [], "norms": []}
    if subject.role == "actor":
        scored = worker.old_logprobs_and_squares(local.select(("token_ids", "loss_mask", "group_id")))
        seen["scores"] = [scored.per_seq(scored[c]) for c in ("old_logprobs", "sum_pi_squared")]
    else:
        scored = worker.values(local.select(("token_ids", "loss_mask", "group_id")))
        seen["scores"] = [scored.per_seq(scored["values"])]
    optimizer = worker.engine.optimizer
    step = optimizer.step

    def watched(scale: float) -> None:
        if not seen["steps"]:
            pairs = zip(optimizer.names, optimizer.params, optimizer.grads, strict=True)
            seen["grads"] = {n: (worker.engine.holding.box(n, p), g.clone()) for n, p, g in pairs}
        step(scale)

    optimizer.step = watched
    update = worker.update_actor if subject.role == "actor" else worker.update_critic
    for number, plan in enumerate(plans(subject, batch, index)):
        if number == 2:  # out of its storage and back
            worker.engine.place("host")
            worker.engine._moved(torch.clone, torch.clone)
            worker.engine.place("device")
        seen["steps"].append(update(local, plan=plan).values_by_name())
    seen["answers"] = THREE_D.answers(mesh.coord, mesh.layout)
    seen["weights"] = held_weights(worker.engine)
    seen["bytes"] = state_bytes(worker.engine)
    seen["cut"] = {is_cut(p) for p in worker.engine.module.parameters()}
    after(subject, worker, local, plans(subject, batch, index)[0], folder / f"{name}-export", mesh, seen)
    return seen


def held_weights(engine: Any) -> dict[str, tuple[Box, torch.Tensor]]:
    """By name where this rank's part lies in the whole, and the part."""
    return {n: (engine.holding.box(n, p), part(p).detach().clone()) for n, p in engine.module.named_parameters()}


def same(a: dict[str, tuple[Box, torch.Tensor]], b: dict[str, tuple[Box, torch.Tensor]]) -> bool:
    return all(torch.equal(a[n][1], b[n][1]) for n in a)


def state(engine: Any) -> dict[str, tuple[Box, torch.Tensor]]:
    """Masters and moments by KIND/NAME, where this rank's part lies in the whole, and the part."""
    return {key: (piece.box, piece.tensor.clone()) for key, piece in engine.pieces().items()}


def after(
    subject: Subject, worker: Any, local: Batch, plan: Any, folder: Path, mesh: Mesh, seen: dict[str, Any]
) -> None:
    """A checkpoint that another worker goes on from, an export, and a gradient that is not finite on one rank."""
    saved = folder.with_name(folder.name.replace("-export", "-state"))
    seen["files"] = worker.save(str(saved))
    if subject.role == "actor" and subject.dtype == "float32":
        worker.export(str(folder))
    other = subject.worker(folder.parent, mesh)
    other.restore(str(folder.parent / f"one-{saved.name.split('-')[1]}-state"))
    seen["from_one"] = state(other.engine)
    other.restore(str(saved))
    update = "update_actor" if subject.role == "actor" else "update_critic"
    for one in (worker, other):
        getattr(one, update)(local, plan=plan)
    pair = [held_weights(one.engine) for one in (worker, other)]
    seen["resumed"] = same(*pair)
    if mesh.coord.dp == mesh.layout.dp - 1:
        next(g for g in reversed(worker.engine.optimizer.grads) if g.numel()).flatten()[0] = float("inf")
    worker.engine.optim_step()
    seen["skipped"] = worker.engine.skipped_steps, same(pair[0], held_weights(worker.engine))
    seen["kernels_take"] = {Kernels.takes(Any, p.detach().bfloat16()) for p in worker.engine.module.parameters()}


def run_rank(process: int, folder: Path) -> None:
    for stage, names in enumerate(STAGES):
        first = 0
        for name in names:
            layout = LAYOUTS[name]
            rank, first = process - first, first + layout.world
            if 0 <= rank < layout.world:
                store = dist.FileStore(str(folder / f"store-{stage}-{name}"), layout.world)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world, timeout=PATIENCE)
                train_all(name, folder, Mesh.of(layout))
                dist.destroy_process_group()


def train_all(name: str, folder: Path, mesh: Mesh) -> None:
    seen = {s: train(SUBJECTS[s], f"{name}-{s}", folder, mesh) for x, s in CASES if x == name}
    torch.save(seen, folder / f"{name}-{mesh.rank}.pt")


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    logprobs._CHUNK_ELEMENTS = 1500  # a few states a chunk, so that heads are computed again in backward
    train_all("one", folder, SINGLE)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, folder), daemon=True) for rank in range(4)]
    for rank in ranks:
        rank.start()
    return ended(ranks)


def ended(ranks: Sequence[Any]) -> int:
    """0 once all of these processes are done; of one that failed its exit code, and then none is left."""
    while running := [rank for rank in ranks if rank.is_alive()]:  # asked once: a wait for none would never end
        multiprocessing.connection.wait([rank.sentinel for rank in running])
        if any(rank.exitcode for rank in ranks):  # the others would wait for it
            for rank in ranks:
                rank.kill()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
