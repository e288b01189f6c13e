"""The quickstart's run on a Ray cluster that runs already. Its flags are the quickstart's.

  ray start --head                              on one machine; it prints its address
  ray start --address=HOST:6379                 on each of the others
  python examples/ray/cluster.py --nproc 16     on one of them; --address HOST:6379 chooses between clusters

Every machine has verl installed, and sees models, data and --output_dir under the same paths.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ppo"))

import quickstart

from verl.cli.arguments import run_main

HERE = ("--address", "auto", "--nproc", "2", "--output_dir", "./outputs/cluster")
"""Flags that come first, so that those of the command line hold."""

if __name__ == "__main__":
    sys.exit(run_main(lambda: quickstart.main([*HERE, *sys.argv[1:]], description=__doc__)))
