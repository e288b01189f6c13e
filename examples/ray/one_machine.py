"""The quickstart's run on two processes of this machine. Its flags are the quickstart's; Ray starts and ends with it.

python examples/ray/one_machine.py
python examples/ray/one_machine.py --nproc 8 --actor_model_path ./models/llama3-8b-instruct ...   (a GPU for each)
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ppo"))

import quickstart

from verl.cli.arguments import run_main

HERE = ("--nproc", "2", "--output_dir", "./outputs/one_machine")
"""Flags that come first, so that those of the command line hold."""

if __name__ == "__main__":
    sys.exit(run_main(lambda: quickstart.main([*HERE, *sys.argv[1:]], description=__doc__)))
