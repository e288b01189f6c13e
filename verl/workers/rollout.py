"""The sampler: turns prompts into trajectories through a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl.core.generation import Completion, GenRequest, SamplingParams
from verl.core.prompt import Prompt
from verl.core.protocols import RolloutEngine
from verl.core.rng import derive_seed
from verl.core.trajectory import Trajectory


class RolloutWorker:
    """engine: any rollout engine; tokenizer: makes the text view; seed: of the run."""

    def __init__(self, engine: RolloutEngine, tokenizer: Any, seed: int):
        self.engine, self.tokenizer, self.seed = engine, tokenizer, seed

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        stream: str,
        step: int,
        *,
        first_group: int = 0,
        greedy: bool = False,
    ) -> list[Trajectory]:
        """n trajectories a prompt, prompt-major. Each seed is a function of (run, stream, step, prompt, number).

        first_group: number of the first prompt's group. greedy: one trajectory more a prompt, behind its n, of the most
        probable tokens; its sample_id is n.
        """
        asked: dict[str, tuple[Prompt, int, int]] = {}
        requests = []
        for g, prompt in enumerate(prompts, start=first_group):
            for k in range(n + greedy):
                name = f"{stream}/{step}/{g}/{k}"
                asked[name] = (prompt, g, k)
                own = replace(params, seed=derive_seed(self.seed, stream, step, prompt.id, k))
                own = replace(own, temperature=0.0) if k == n else own
                requests.append(GenRequest(name, f"{stream}/{step}/{g}", tuple(prompt.token_ids), own))
        done = self._run(requests)
        return [self._trajectory(prompt, done[name], g, k) for name, (prompt, g, k) in asked.items()]

    def _run(self, requests: Sequence[GenRequest]) -> dict[str, Completion]:
        waiting = {r.id for r in requests}
        done: dict[str, Completion] = {}
        self.engine.submit(requests)
        while waiting:
            for completion in self.engine.poll():
                waiting.remove(completion.request_id)
                done[completion.request_id] = completion
        return done

    def _trajectory(self, prompt: Prompt, completion: Completion, group: int, sample: int) -> Trajectory:
        text = self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        return Trajectory.of(prompt, completion, text, group, sample)
