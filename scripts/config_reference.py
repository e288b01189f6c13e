"""Write docs/reference/config.md from the config classes; `--check` fails if the file is not what they say."""

import sys
from pathlib import Path

from verl.cli.reference import markdown

FILE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "config.md"


def main() -> int:
    page = markdown()
    if "--check" not in sys.argv[1:]:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(page, encoding="utf-8")
        return 0
    if FILE.is_file() and FILE.read_text(encoding="utf-8") == page:
        return 0
    print(f"error: {FILE.name} is not what the config classes say; run: make docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
