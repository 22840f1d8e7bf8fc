"""`python helm/source` makes two files of the chart, README.md and values.schema.json. It reads
values.yaml with its comments, and schema.py.

With `--check` nothing is written, and the exit status is 1 if a file differs from the text that
would be written.
"""

import argparse
import json
import sys
from pathlib import Path

import readme
import schema

CHART = Path(__file__).parent.parent / "tandem"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = (CHART / "values.yaml").read_text()
    made = {
        "values.schema.json": json.dumps(schema.of(text), indent=2) + "\n",
        "README.md": readme.of(text),
    }
    stale = [name for name, content in made.items() if not _is(CHART / name, content)]
    for name in stale if not check else ():
        (CHART / name).write_text(made[name])
    if stale:
        print(f"{'stale' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


def _is(path: Path, content: str) -> bool:
    return path.is_file() and path.read_text() == content


if __name__ == "__main__":
    sys.exit(main())
