"""One of four processes: `python -m tests.parallel.worker RANK FOLDER` runs every check and writes what failed."""

from __future__ import annotations

import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(rank: int, folder: Path) -> None:
    from tests.parallel.checks import CHECKS, World

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    world, results = World(folder), {}
    for name, check in CHECKS.items():
        start = time.perf_counter()
        fault = ""
        try:
            check(world)
        except Exception:  # noqa: BLE001 - whatever it is, the others must hear of it
            fault = f"rank {rank}: {traceback.format_exc()}"
            print(name, fault, file=sys.stderr, flush=True)
        faults = [""] * 4
        dist.all_gather_object(faults, fault)
        results[name] = "\n".join(filter(None, faults)), time.perf_counter() - start
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
