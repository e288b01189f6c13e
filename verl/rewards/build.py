"""From the reward section of the configuration to a composer, checked against the data before any model loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from verl.config.reward import RewardConfig
from verl.core import ConfigError, Prompt, RewardError
from verl.rewards.composer import VERIFIER, RewardComposer
from verl.rewards.functions import RewardFunction
from verl.rewards.verifiers import MAIN_THREAD, QUICK, VERIFIERS, Verifier, verifier_name

THREE_WAYS = (
    "give a reward model (--reward_model_path, reward.model_path), "
    "a function (reward.functions=[{path: FILE.py:NAME}]), "
    "or a data set with a verifier (--dataset_name reasoning_gym:TASK, GSM8K form; else reward.verifier=NAME)"
)


def build_rewards(
    cfg: RewardConfig,
    prompts: Sequence[Prompt],
    functions: Sequence[RewardFunction] = (),
    *,
    reward_model: bool | None = None,
) -> RewardComposer:
    """The composer for these prompts (training and evaluation ones together).

    functions: besides those of the configuration. reward_model: whether there is one; None: as reward.model_path says.
    Raises ConfigError or RewardError where nothing would score, or a prompt could not be verified.
    """
    has_model = cfg.model_path is not None if reward_model is None else reward_model
    every = [RewardFunction.load(f.path, f.weight) for f in cfg.functions] + list(functions)
    verifiers = choose_verifiers(cfg.verifier, prompts, others=has_model or bool(every))
    if not (has_model or every or verifiers):
        raise ConfigError(f"reward: nothing scores the responses; {THREE_WAYS}")
    composer = RewardComposer(every, verifiers, has_model)
    _try(composer.verifiers, prompts)
    return composer


def early_parts(stream: bool | Literal["auto"], composer: RewardComposer) -> frozenset[str]:
    """Names of the parts that a thread may score while other responses are sampled. `stream` is reward.stream.

    A verifier that needs the main thread (its deadline is a signal, say) is not among them.
    """
    if stream is False:
        return frozenset()
    here = {entry.fn for entry in VERIFIERS if MAIN_THREAD in entry.needs}
    threaded = composer.verifiers and not here & set(composer.verifiers.values())
    functions = [f.name for f in composer.functions] if stream is True else []
    return frozenset([VERIFIER] * bool(threaded) + functions)


def choose_verifiers(chosen: str, prompts: Sequence[Prompt], others: bool) -> dict[str | None, Verifier]:
    """Verifiers by prompt source. `chosen` is reward.verifier; `others` says whether something else scores already."""
    if chosen == "off" or (chosen == "auto" and others):
        return {}
    if chosen != "auto":
        return {None: VERIFIERS[chosen].fn}
    counts = Counter(p.source for p in prompts)
    if set(counts) <= {None}:
        return {}
    names = {source: verifier_name(source) for source in counts if source is not None}
    unknown = {source: n for source, n in counts.most_common() if source is None or names[source] is None}
    if unknown:
        listed = ", ".join(f"{source or 'rows without a source'} ({n} prompts)" for source, n in unknown.items())
        raise RewardError(
            f"reward.verifier=auto: no verifier for the data sources {listed}; known: {', '.join(VERIFIERS.names())}; "
            "force one with reward.verifier=NAME, or give reward.model_path or reward.functions"
        )
    return {source: VERIFIERS[name].fn for source, name in names.items() if name is not None}


def _try(verifiers: dict[str | None, Verifier], prompts: Sequence[Prompt]) -> None:
    """Each verifier on an empty response: a missing package or a bad reference shows now, not in the middle of a run.

    Quick ones see every prompt, the others the first of each source.
    """
    firsts = {p.source: p for p in reversed(prompts)}
    composer = RewardComposer(verifiers=verifiers)
    for prompt in prompts:
        verifier = verifiers.get(None) or verifiers.get(prompt.source)
        if verifier is not None and (verifier in QUICK or prompt is firsts[prompt.source]):
            composer.score([prompt], [""])
