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
from verl.config.names import NAMES

HELP = {
    "ppo_clip_coef": "The probability ratio is clipped to within this of 1.",
    "kl_coef": "Weight of the KL to the reference; 0 builds no reference.",
    "learning_rate": "Peak learning rate of the actor.",
    "critic_learning_rate": "Peak learning rate of the critic.",
}
FLAGS = tuple(Flag(name, paths, HELP.get(name, "")) for name, paths in NAMES.items())
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


def main(argv: Sequence[str], description: str = __doc__) -> int:
    cfg, dry_run = FlagTable(FLAGS, configure).parse(argv, description)
    return launch(cfg, dry_run)


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
