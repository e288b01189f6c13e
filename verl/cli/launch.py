"""From a resolved configuration to an exit code: the dry run, or the training."""

from __future__ import annotations

import sys

import yaml

from verl.config.run import RunConfig


def launch(cfg: RunConfig, dry_run: bool = False) -> int:
    """0, or 1 when fewer steps were trained than planned. A dry run prints the configuration and the sizes."""
    if dry_run:
        from verl.cli.sizes import print_sizes

        print(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True), flush=True)
        print_sizes(cfg)
        return 0
    from verl.trainer import run

    result = run(cfg)
    if result.steps_trained < result.steps_planned:
        print(f"error: {result.steps_trained} of {result.steps_planned} planned steps were trained", file=sys.stderr)
        return 1
    return 0
