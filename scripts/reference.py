"""Write the pages of docs/reference/ from the code; `--check` fails if a file is not what the code says."""

import sys
from pathlib import Path

from verl.cli import catalogue, reference

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
PAGES = {"config.md": reference.markdown, "algorithms.md": catalogue.markdown}


def main() -> int:
    stale = 0
    for name, write in PAGES.items():
        page, file = write(), FOLDER / name
        if "--check" not in sys.argv[1:]:
            FOLDER.mkdir(parents=True, exist_ok=True)
            file.write_text(page, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != page:
            print(f"error: {name} is not what the code says; run: make docs", file=sys.stderr)
            stale += 1
    return min(stale, 1)


if __name__ == "__main__":
    sys.exit(main())
