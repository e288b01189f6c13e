"""The command `verl`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

import verl
from verl.algos.presets import PRESETS, preset_values
from verl.cli import reference
from verl.cli.arguments import Parser, run_main
from verl.cli.launch import launch
from verl.config import parse_override, read_yaml, resolve
from verl.config.loader import Tree
from verl.core.errors import ConfigError
from verl.core.registry import suggestion

COMMANDS = {
    "train": "train as a YAML file and section.key=value overrides say",
    "plan": "find the placement and layouts that make a step shortest on N GPUs",
    "algorithms": "list the algorithm presets with their sources, or tell all of one",
    "config": "print the configuration reference, or one section of it",
}


def _train(argv: Sequence[str]) -> int:
    parser = Parser(
        override="",
        prog="verl train",
        description="Train. Order: class defaults, preset (algorithm.name), CONFIG.yaml, overrides.",
        epilog="example: verl train examples/ppo/quickstart.yaml actor.optim.lr=1e-6 algorithm.name=grpo --dry-run",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="a file with sections such as `actor:`")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="see `verl config`")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the sizes, train nothing")
    parser.add_argument("--resume", action="store_true", help="same as trainer.resume=true")
    options = parser.parse_strictly(argv, words_first=True)
    layers = _layers(_words(options), "train")
    if options.resume:
        layers.append({"trainer": {"resume": True}})
    return launch(resolve(layers, preset_values()), options.dry_run)


def _plan(argv: Sequence[str]) -> int:
    from verl.cli import plan

    parser = Parser(
        override="",
        prog="verl plan",
        usage="verl plan [CONFIG.yaml] [section.key=value ...] --gpus N [flags]",
        description="Find the placement and the layout of each role that make a step shortest, by an analytic cost\n"
        "model (docs/planning.md). Reads model configs only: no weights, no data, no GPU.",
        epilog="example: verl plan run.yaml algorithm.name=grpo actor.path=./llama/config.json --gpus 16",
    )
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG.yaml ...", help="a file, then section.key=value, as for `verl train`"
    )
    plan.add_flags(parser)
    options = parser.parse_strictly(argv)
    return plan.run(resolve(_layers(options.words, "plan"), preset_values()), options, shlex.join(options.words))


def _words(options: argparse.Namespace) -> list[str]:
    return [*([options.config] if options.config else []), *options.overrides]


def _layers(words: Sequence[str], command: str) -> list[Tree]:
    """The file, if the first word is one, and the overrides."""
    if not words:
        raise ConfigError(
            f"CONFIG.yaml: verl {command} needs a file, such as examples/ppo/quickstart.yaml, or section.key=value; "
            f"see verl {command} --help"
        )
    file, rest = ([], words) if _is_override(words[0]) else ([read_yaml(words[0])], words[1:])
    return [*file, *(parse_override(word) for word in rest)]


def _is_override(word: str) -> bool:
    key = word.partition("=")[0]
    return "=" in word and not key.endswith((".yaml", ".yml")) and "/" not in key


def _algorithms(argv: Sequence[str]) -> int:
    parser = Parser(prog="verl algorithms", description="List the presets of algorithm.name, or tell all of one.")
    parser.add_argument("name", nargs="?", help="for example: dapo")
    name = parser.parse_strictly(argv).name
    if name is not None:
        _tell(name)
        return 0
    for preset in PRESETS.values():
        print(f"{preset.name}\n  {preset.doc}\n  Source: {preset.source}")
    print("\n`verl algorithms NAME` shows what a preset sets; formulas: docs/reference/algorithms.md")
    return 0


def _tell(name: str) -> None:
    if name not in PRESETS:
        raise ConfigError(f"{name}: unknown preset{suggestion(name, list(PRESETS))}; known: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    print(f"{name}\n  {preset.doc}\n  Source: {preset.source}")
    if preset.ours:
        print(f"  Ours, not the source's: {preset.ours}")
    for section, values in preset.values.items():
        for key, value in values.items():
            if key != "name":
                print(f"    {section}.{key} = {reference.show(value)}")


def _config(argv: Sequence[str]) -> int:
    parser = Parser(prog="verl config", description="Print the configuration reference.")
    parser.add_argument("section", nargs="?", help="for example: actor.optim")
    print(reference.text(parser.parse_strictly(argv).section), end="")
    return 0


def _dispatch(argv: Sequence[str]) -> int:
    listing = "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="verl",
        usage="verl COMMAND ...",
        description=f"Post-training of language models with reinforcement learning.\n\ncommands:\n{listing}",
        epilog="`verl COMMAND --help` tells more. First run without a config: python examples/ppo/quickstart.py",
    )
    parser.add_argument("--version", action="version", version=f"verl {verl.__version__}")
    if not argv or argv[0].startswith("-"):
        parser.parse_strictly(argv)
        parser.print_help()
        return 0
    command, rest = argv[0], argv[1:]
    run = {"train": _train, "plan": _plan, "algorithms": _algorithms, "config": _config}.get(command)
    if run is None:
        raise ConfigError(
            f"{command}: unknown command{suggestion(command, list(COMMANDS))}; commands: {', '.join(COMMANDS)}"
        )
    return run(rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_main(lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
