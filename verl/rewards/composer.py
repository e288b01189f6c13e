"""Total reward of each response, and its parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl.core import Prompt, RewardError, VerlError
from verl.rewards.functions import RewardFunction, describe
from verl.rewards.values import checked_value, checked_values
from verl.rewards.verifiers import Verifier

MODEL = "reward_model"
VERIFIER = "verifier"
OVERLONG = "overlong"
METRIC_NAMES = ("std", "greedy", "score")
"""Taken by the metrics reward/std and reward/greedy, and by the filter's word for the total."""


Parts = dict[str, list[float]]
"""Unweighted values by name of the part, one a response."""


@dataclass(frozen=True)
class Rewards:
    """One number a response. `parts` are unweighted, by name, with their `weights`; `total` is what is trained on."""

    total: list[float]
    parts: dict[str, list[float]]
    weights: dict[str, float]

    def with_part(self, name: str, values: Sequence[float], weight: float = 1.0) -> Rewards:
        """One more part, added to the total."""
        assert name not in self.parts and len(values) == len(self.total)
        total = [was + weight * value for was, value in zip(self.total, values, strict=True)]
        return Rewards(total, {**self.parts, name: list(values)}, {**self.weights, name: weight})

    def take(self, rows: Iterable[int]) -> Rewards:
        """Of these responses, in this order."""
        index = list(rows)
        parts = {name: [values[i] for i in index] for name, values in self.parts.items()}
        return Rewards([self.total[i] for i in index], parts, self.weights)

    @staticmethod
    def concat(several: Sequence[Rewards]) -> Rewards:
        """Of all responses, in order; every one has the same parts."""
        first = several[0]
        parts = {name: [v for r in several for v in r.parts[name]] for name in first.parts}
        return Rewards([v for r in several for v in r.total], parts, first.weights)


class RewardComposer:
    """total = reward model + verifier + sum(weight * function). It has no state: any subset may be scored at any time.

    functions: user functions with weights. verifiers: by prompt source; the key None scores every prompt whatever its
    source. reward_model: whether its scores will be given to `score`.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction] = (),
        verifiers: Mapping[str | None, Verifier] | None = None,
        reward_model: bool = False,
    ):
        self.verifiers = dict(verifiers or {})
        self.reward_model = reward_model
        self.functions: list[RewardFunction] = []
        for function in functions:
            self.add(function)

    def add(self, function: RewardFunction) -> None:
        """One more function; a name that is taken gets a number behind it."""
        taken = {MODEL, VERIFIER, OVERLONG, *METRIC_NAMES, *(f.name for f in self.functions)}
        name, number = function.name, 2
        while name in taken:
            name, number = f"{function.name}_{number}", number + 1
        self.functions.append(RewardFunction(name, function.fn, function.weight))

    @property
    def names(self) -> list[str]:
        """Names of the parts, in the order of the sum."""
        fixed = [MODEL] * self.reward_model + [VERIFIER] * bool(self.verifiers)
        return fixed + [f.name for f in self.functions]

    def parts(self, prompts: Sequence[Prompt], responses: Sequence[str], names: Collection[str]) -> Parts:
        """Values of the verifier and the functions among `names`; raises as `score` does."""
        assert len(prompts) == len(responses), f"{len(prompts)} prompts, {len(responses)} responses"
        out: Parts = {}
        if VERIFIER in names:
            rows = enumerate(zip(prompts, responses, strict=True))
            out[VERIFIER] = [self._verify(row, p, r) for row, (p, r) in rows]
        texts = [p.text for p in prompts]
        for function in self.functions:
            if function.name in names:
                out[function.name] = function.score(texts, list(responses))
        return out

    def score(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        rm_scores: Sequence[float] | None = None,
        early: Mapping[str, list[float]] | None = None,
    ) -> Rewards:
        """Rewards of responses[i] to prompts[i]. Raises RewardError that names the source, the row and the value.

        early: what `parts` said of these responses before; asked for no more.
        """
        assert (rm_scores is not None) == self.reward_model, "reward model scores are given exactly where there is one"
        known = dict(early or {})
        if rm_scores is not None:
            known[MODEL] = checked_values(rm_scores, len(responses), "reward model")
        known |= self.parts(prompts, responses, [name for name in self.names if name not in known])
        parts = {name: known[name] for name in self.names}
        weights = dict.fromkeys(parts, 1.0) | {f.name: f.weight for f in self.functions}
        total = [sum(weights[name] * values[row] for name, values in parts.items()) for row in range(len(responses))]
        return Rewards([float(value) for value in total], parts, weights)

    def _verify(self, row: int, prompt: Prompt, response: str) -> float:
        key = None if None in self.verifiers else prompt.source
        assert key in self.verifiers, (
            f"prompt {prompt.id!r}: source {key!r} was not there when the verifiers were chosen"
        )
        name = f"verifier {prompt.source!r}" if key is not None else "verifier"
        try:
            value = self.verifiers[key](response, prompt)
        except VerlError:
            raise
        except Exception as e:  # outside code: a library's scorer may raise anything
            raise RewardError(
                f"{name}: row {row}, prompt {prompt.id!r}: raised {describe(e)} on {response!r:.60}"
            ) from e
        return checked_value(value, row, name)
