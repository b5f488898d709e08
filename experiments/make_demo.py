"""What does `make demo` print? Writes the table of README.md and docs/demo.png.

    python experiments/make_demo.py            # trains, about half a minute on one core
    python experiments/make_demo.py --check    # trains, and tells whether the page is up to date

Times are virtual, so they are the same on every machine.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import kept

PAGE = kept.ROOT / "README.md"
FIGURE = kept.ROOT / "docs" / "demo.png"
_WIDTH = 80  # columns


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "gradwire", "demo", "--out", folder],
            env={**os.environ, "COLUMNS": str(_WIDTH)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        printed = done.stdout.partition("Figure: ")[0].rstrip()
        lines = (f"    {line}".rstrip() for line in printed.splitlines())
        table = "\n" + "\n".join(lines) + "\n"
        kept.write_page(PAGE, kept.with_tables(PAGE.read_text(), {"demo": table}))
        if not kept.checks():
            FIGURE.write_bytes((Path(folder) / "comparison.png").read_bytes())


if __name__ == "__main__":
    main()
