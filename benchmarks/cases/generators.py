"""The sides of the rollout benchmark: each takes a `Work` and a seed, and says how long it took."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from cases.workload import Ran, Work
from common import seconds_of, wait
from peers.vllm_side import ENV
from peers.wire import Peer
from verl.core import GenRequest, SamplingParams
from verl.core.rng import derive_seed
from verl.models.export import export

_PAD = 0


class Side(Protocol):
    """One way to generate."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what it runs in another process."""

    def __call__(self, work: Work, seed: int) -> Ran: ...


class EngineSide:
    """A rollout engine of verl's, through submit and poll, as a training step uses it."""

    versions: Mapping[str, str] = {}

    def __init__(self, engine: Any, device: str):
        self.engine, self.device = engine, device

    def __call__(self, work: Work, seed: int) -> Ran:
        requests = [self._request(work, seed, i, k) for i in range(len(work.prompts)) for k in range(work.n)]
        lengths: dict[str, int] = {}
        passes = 0
        wait(self.device)
        start = time.perf_counter()
        self.engine.submit(requests)
        while len(lengths) < len(requests):
            lengths.update((c.request_id, len(c.token_ids)) for c in self.engine.poll())
            passes += 1
        wait(self.device)
        return Ran(time.perf_counter() - start, [lengths[r.id] for r in requests], passes)

    @staticmethod
    def _request(work: Work, seed: int, prompt: int, sample: int) -> GenRequest:
        own = derive_seed(seed, "benchmark", prompt, sample)
        params = SamplingParams(max_tokens=work.most, min_tokens=work.least, seed=own)
        return GenRequest(f"{prompt}/{sample}", str(prompt), tuple(work.prompts[prompt]), params)


class GenerateSide:
    """transformers' own `generate`: static batches of `rows` sequences in the order given, padded on the left."""

    versions: Mapping[str, str] = {}

    def __init__(self, module: Any, rows: int, device: str):
        self.module, self.rows, self.device = module, rows, device

    def __call__(self, work: Work, seed: int) -> Ran:
        torch.manual_seed(seed)
        lengths: list[int] = []
        prompts = max(1, self.rows // work.n)

        def run() -> None:
            for i in range(0, len(work.prompts), prompts):
                lengths.extend(self._batch(work, work.prompts[i : i + prompts]))

        return Ran(seconds_of(run, self.device), lengths)

    @torch.no_grad()
    def _batch(self, work: Work, prompts: list[list[int]]) -> list[int]:
        width = max(map(len, prompts))
        ids = torch.tensor([[_PAD] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        out = self.module.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=work.n,
            max_new_tokens=work.most,
            min_new_tokens=work.least,
            eos_token_id=None if work.exact else list(work.ends),
            pad_token_id=_PAD,
        )
        return [work.most if work.exact else _length(row, work.ends) for row in out[:, width:].tolist()]


def _length(row: list[int], ends: tuple[int, ...]) -> int:
    """Tokens up to the first end token, which counts."""
    return next((i + 1 for i, token in enumerate(row) if token in ends), len(row))


class VLLMSide:
    """vLLM in a child process; the model is read from `folder`."""

    def __init__(self, python: str, folder: str, dtype: str, longest: int, eager: bool):
        self.peer = Peer("peers.vllm_side", python, torch.get_num_threads(), ENV)
        said = self.peer.ask(model=folder, dtype=dtype, max_model_len=longest, eager=eager)
        self.versions: Mapping[str, str] = {k: str(v) for k, v in said.items()}

    def __call__(self, work: Work, seed: int) -> Ran:
        asked = {"prompts": work.prompts, "n": work.n, "least": work.least, "most": work.most}
        said = self.peer.ask(no_end=work.exact, ends=work.ends, **asked)
        return Ran(said["seconds"], said["lengths"])


@contextmanager
def exported(policy: Any) -> Iterator[str]:
    """A temporary folder with the policy in Hugging Face form."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(export(policy, f"{folder}/model"))
