"""The mathematics alone, on padded tensors, for people who bring their own trainer. Needs torch and nothing above it.

Legend: B sequences (rows), T columns (of the responses, or of prompts and responses), K parts of a reward.
Everywhere: mask [B, T] is 1 where the policy drew the token, else 0 (bool, integer or float). What stands at mask 0,
NaN included, and the width of the padding change no result and no gradient; so it is in `kl` where it is given the
mask. Gradients flow to `logprobs` or `values` and to nothing else. float64 stays float64; narrower types are computed
in float32. Errors are ValueError: one line that says what was given and what is expected. Names and constants are those
of the configuration; docs/reference/algorithms.md lists them.

    advantages, _ = compute_advantages("grpo", rewards=scores, mask=mask, group_ids=prompt_ids)
    loss, metrics = policy_loss("ppo_clip", logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask)
    loss.backward()
"""

from verl.algos.functional.credit import compute_advantages
from verl.algos.functional.losses import aggregate, kl, policy_loss, value_loss
from verl.algos.functional.sampler import rollout_weights
from verl.algos.pass_at_k import pass_at_k

__all__ = ["aggregate", "compute_advantages", "kl", "pass_at_k", "policy_loss", "rollout_weights", "value_loss"]
