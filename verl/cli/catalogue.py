"""The page docs/reference/algorithms.md: every registered function with its formula, constants, source and needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

from pydantic import BaseModel

from verl.algos.presets import PRESETS, Preset
from verl.cli.reference import show
from verl.core.registry import Entry

NEEDS = {
    "group_id": "several samples of a prompt (rollout.n at least 2)",
    "values": "a critic",
    "greedy_reward": "one greedy response a prompt, sampled and scored beside the others",
    "reward_parts": "the parts of the reward one by one",
    "reward_weights": "their weights",
    "old_logprobs": "log-probs before the update (with one update a step, those of its own forward)",
    "sum_pi_squared": "the policy's squared probabilities, summed over the vocabulary",
}
HEAD = """# Algorithms

Made from the registries in `verl/algos` by `make docs`; do not edit it by hand. A preset (`algorithm.name`) is one name
for a whole algorithm; each function can also be chosen by itself (`algorithm.advantage`, `algorithm.policy_loss`), and
its constants stand beside its name: `algorithm.policy_loss: {name: ppo_clip, clip_high: 0.28}`. The same functions on
padded tensors, without the rest: `verl.algos.functional`. A function of your own: `examples/custom_algorithm/`.

Notation: `m` is 1 where the policy sampled the token; everything else is left out of every sum. `r` token rewards, `s`
the score of a sample (the sum of its token rewards), `A` advantages, `l` log-prob now, `lo` before the update,
`rho = exp(l - lo)`, `sg` no gradient. A loss is per token; `algorithm.aggregation` makes it one number, with the counts
of the whole mini-batch.

Defaults in the tables are those of the function by itself (and of `verl.algos.functional`); a preset may set others, as
its section shows. With one update a step (`update.epochs` and `update.mini_batches` at 1) every ratio is exactly 1, so
what a loss does to ratios (clips, gates, trust regions) comes into play only with several updates, or with
`algorithm.rollout_correction.old_logprobs=bypass`.
"""


def markdown() -> str:
    """The page. Imports torch."""
    from verl.algos.advantages import ADVANTAGES
    from verl.algos.aggregate import MODE_DOCS
    from verl.algos.kl import KL_ESTIMATORS
    from verl.algos.policy_losses import POLICY_LOSSES

    out = [
        HEAD,
        "## Presets",
        "",
        "| `algorithm.name` | advantage | policy loss | aggregation | KL |",
        "|---|---|---|---|---|",
    ]
    out += [_row(p) for p in PRESETS.values()]
    for preset in PRESETS.values():
        out += ["", f"### {preset.name}", "", *_preset(preset)]
    out += ["", "## Advantages", *_entries(ADVANTAGES, "advantage")]
    out += ["", "## Policy losses", *_entries(POLICY_LOSSES, "policy_loss")]
    out += ["", "## KL estimators", "", _KL, ""]
    out += [f"- `{entry.name}`: {' '.join(entry.doc.split())}" for entry in KL_ESTIMATORS]
    out += [
        "",
        "## Aggregations",
        "",
        "`algorithm.aggregation`; counts are those of the whole mini-batch, all ranks.",
        "",
    ]
    out += [f"- `{name}`: {doc}" for name, doc in MODE_DOCS.items()]
    return "\n".join(out) + "\n"


_KL = (
    "`algorithm.kl.estimator`, on `d = l - l_ref`. With a `+` behind it, an estimator keeps its value and takes the "
    "gradient of `k2`, which on policy is that of the reverse KL."
)


def _row(preset: Preset) -> str:
    a = preset.values["algorithm"]
    kl = f"{a['kl']['estimator']} in the {a['kl']['place']}, {show(a['kl']['coef'])}" if a["kl"]["coef"] else "none"
    return f"| `{preset.name}` | {a['advantage']['name']} | {a['policy_loss']['name']} | {a['aggregation']} | {kl} |"


def _preset(preset: Preset) -> list[str]:
    out = [preset.doc, "", f"Source: {preset.source}."]
    if preset.ours:
        out += ["", f"Ours, not the source's: {preset.ours}."]
    out += ["", "```yaml"]
    for section, values in preset.values.items():
        out += [f"{section}:", *(f"  {key}: {show(value)}" for key, value in values.items())]
    return [*out, "```"]


def _entries(registry: Iterable[Entry[Callable[..., Any]]], key: str) -> list[str]:
    out = []
    for entry in registry:
        out += ["", f"### {entry.name}", "", inspect.cleandoc(entry.doc), ""]
        fields = cast(type[BaseModel], entry.config).model_fields if entry.config is not None else {}
        if fields:
            out += ["| constant | default | |", "|---|---|---|"]
            out += [
                f"| `{n}` | `{show(f.get_default())}` | {' '.join((f.description or '').split())} |"
                for n, f in fields.items()
            ]
            out.append("")
        needs = "; ".join(NEEDS.get(column, f"column `{column}`") for column in entry.needs)
        used = [name for name, p in PRESETS.items() if p.values["algorithm"][key]["name"] == entry.name]
        out.append(f"Needs: {needs or 'nothing more'}. Presets: {', '.join(f'`{u}`' for u in used) or 'none'}.")
    return out
