"""The sampler: turns prompts into trajectories through a rollout engine."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from verl.core.generation import Completion, GenRequest, SamplingParams
from verl.core.prompt import Prompt
from verl.core.protocols import RolloutEngine
from verl.core.rng import derive_seed
from verl.core.trajectory import Trajectory

Finished = tuple[int, list[Trajectory]]
"""Place of a prompt among those asked for, and its trajectories by number."""


class RolloutWorker:
    """engine: any rollout engine; tokenizer: makes the text view; seed: of the run."""

    def __init__(self, engine: RolloutEngine, tokenizer: Any, seed: int):
        self.engine, self.tokenizer, self.seed = engine, tokenizer, seed

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, stream: str, step: int
    ) -> list[Trajectory]:
        """All of `as_finished`, prompt-major."""
        rows = dict(done for some in self.as_finished(prompts, n, params, stream, step) for done in some)
        return [t for place in range(len(prompts)) for t in rows[place]]

    def as_finished(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        stream: str,
        step: int,
        *,
        first_group: int = 0,
        greedy: bool = False,
    ) -> Generator[list[Finished], None, None]:
        """After each step of the engine, the prompts whose n trajectories are all done: often [], in any order.

        Each seed is a function of (run, stream, step, prompt, number). Whoever stops early aborts what still runs.
        first_group: number of the first prompt's group. greedy: one trajectory more a prompt, behind its n, of the most
        probable tokens; its sample_id is n.
        """
        asked: dict[str, tuple[int, int]] = {}
        requests = []
        for place, prompt in enumerate(prompts):
            group = f"{stream}/{step}/{first_group + place}"
            for k in range(n + greedy):
                own = replace(params, seed=derive_seed(self.seed, stream, step, prompt.id, k))
                own = replace(own, temperature=0.0) if k == n else own
                asked[f"{group}/{k}"] = (place, k)
                requests.append(GenRequest(f"{group}/{k}", group, tuple(prompt.token_ids), own))
        rows: list[dict[int, Trajectory]] = [{} for _ in prompts]
        with closing(self._run(requests)) as steps:
            for completions in steps:
                places = []
                for completion in completions:
                    place, k = asked[completion.request_id]
                    rows[place][k] = self._trajectory(prompts[place], completion, first_group + place, k)
                    places.append(place)
                full = (p for p in dict.fromkeys(places) if len(rows[p]) == n + greedy)
                yield [(p, [rows[p][k] for k in range(n + greedy)]) for p in full]

    def counts(self) -> Mapping[str, int]:
        """What the engine has counted since it was made."""
        return self.engine.counts()

    def _run(self, requests: Sequence[GenRequest]) -> Generator[list[Completion], None, None]:
        """What each step of the engine completes. Closed or failing early, it leaves no request in the engine."""
        waiting = {r.id for r in requests}
        self.engine.submit(requests)
        try:
            while waiting:
                completions = self.engine.poll()
                waiting -= {c.request_id for c in completions}
                yield completions
        finally:
            if waiting:
                self.engine.abort(waiting)

    def _trajectory(self, prompt: Prompt, completion: Completion, group: int, sample: int) -> Trajectory:
        text = self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        return Trajectory.of(prompt, completion, text, group, sample)
