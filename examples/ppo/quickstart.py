"""First training. With no flag: SmolLM2-135M-Instruct learns one-digit sums, on CPU, in a few minutes.

A flag sets one value of the configuration; --help shows the values in force. Examples:
  python examples/ppo/quickstart.py
  python examples/ppo/quickstart.py --algorithm grpo --learning_rate 1e-5
  python examples/ppo/quickstart.py --actor_model_path ./models/llama3-8b-instruct --reward_model_path ./models/rm \\
      --dataset_name trl-lib/ultrafeedback_binarized --output_dir ./outputs/ppo-llama3-quickstart
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from verl.algos.presets import PRESETS, preset_values
from verl.cli.arguments import run_main
from verl.cli.flags import Flag, FlagTable
from verl.cli.launch import launch
from verl.config import RunConfig, read_yaml, resolve
from verl.config.loader import Tree, overlay

FLAGS = (
    Flag("actor_model_path", ("actor.path",)),
    Flag("ref_model_path", ("ref.path",)),
    Flag("critic_model_path", ("critic.path",)),
    Flag("reward_model_path", ("reward.model_path",)),
    Flag("dataset_name", ("data.dataset",)),
    Flag("eval_dataset", ("data.eval_dataset",)),
    Flag("eval_size", ("data.eval_size",)),
    Flag("output_dir", ("trainer.output_dir",)),
    Flag("num_episodes", ("trainer.num_episodes",)),
    Flag("max_steps_per_episode", ("trainer.max_steps_per_episode",)),
    Flag("algorithm", ("algorithm.name",)),
    Flag(
        "ppo_clip_coef",
        ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high"),
        "The probability ratio is clipped to within this of 1.",
    ),
    Flag("kl_coef", ("algorithm.kl.coef",), "Weight of the KL to the reference; 0 builds no reference."),
    Flag("learning_rate", ("actor.optim.lr",), "Peak learning rate of the actor."),
    Flag("critic_learning_rate", ("critic.optim.lr",), "Peak learning rate of the critic."),
    Flag("prompts_per_step", ("trainer.prompts_per_step",)),
    Flag("samples_per_prompt", ("rollout.n",)),
    Flag("mini_batches", ("update.mini_batches",)),
    Flag("micro_batch_tokens", ("update.micro_batch_tokens",)),
    Flag("max_prompt_tokens", ("data.max_prompt_tokens",)),
    Flag("max_response_tokens", ("rollout.max_response_tokens",)),
    Flag("temperature", ("rollout.sampling.temperature",)),
    Flag("rollout", ("rollout.backend",)),
    Flag("model_implementation", ("model.implementation",)),
    Flag("dtype", ("model.dtype",)),
    Flag("device", ("trainer.device",)),
    Flag("nproc", ("parallel.nproc",)),
    Flag("seed", ("trainer.seed",)),
    Flag("log_every", ("trainer.log_every",)),
    Flag("eval_every", ("eval.every",)),
    Flag("save_every", ("trainer.save_every",)),
    Flag("resume", ("trainer.resume",)),
    Flag("overwrite", ("trainer.overwrite",)),
)
EMBEDDED = read_yaml(Path(__file__).with_name("quickstart.yaml"))
OF_THE_TASK = ("data", "reward", "rollout.max_response_tokens", "trainer.max_steps_per_episode")
OF_THE_MODEL = ("actor", "critic", "algorithm")


def without(tree: Tree, path: str) -> Tree:
    """`tree` less what lies at `path`."""
    key, _, rest = path.partition(".")
    if key not in tree:
        return tree
    inner = {key: without(tree[key], rest)} if rest else {}
    return {k: v for k, v in tree.items() if k != key} | inner


def chooses(tree: Tree, section: str, key: str) -> bool:
    """Whether `tree` sets section.key. A section that is no mapping sets nothing: `resolve` refuses it by name."""
    values = tree.get(section)
    return isinstance(values, dict) and key in values


def configure(layers: Sequence[Tree]) -> RunConfig:
    """The embedded case beneath the user's values. What was chosen for its task (or model) goes with another one."""
    user: Tree = {}
    for layer in layers:
        user = overlay(user, layer)
    embedded = EMBEDDED
    if chooses(user, "data", "dataset"):
        for path in OF_THE_TASK:
            embedded = without(embedded, path)
    if chooses(user, "actor", "path"):
        for path in OF_THE_MODEL:
            embedded = without(embedded, path)
    name = user["algorithm"]["name"] if chooses(user, "algorithm", "name") else "ppo"
    if name in PRESETS and not PRESETS[name].values["algorithm"]["kl"]["coef"]:
        embedded = without(embedded, "algorithm.kl")  # an algorithm without a reference stays without
    return resolve([embedded, user], preset_values())


def main(argv: Sequence[str]) -> int:
    cfg, dry_run = FlagTable(FLAGS, configure).parse(argv, description=__doc__)
    return launch(cfg, dry_run)


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
