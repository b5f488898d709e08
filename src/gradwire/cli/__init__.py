"""The command line: `gradwire run`, `compare`, `sweep`, `report`, `list`, `demo` and others.

One command per file. Commands print machine-readable output with `--json`. Help and errors in
the arguments need no torch, which takes a second or two to import: a command's file imports at its
top only what its options need, and the rest when the command is called.
"""

import sys
from collections.abc import Sequence

import gradwire


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `gradwire` command."""
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        if arguments in (["--version"], ["-V"]):
            print(f"gradwire {gradwire.__version__}")
            return
        # Here, so that an interrupt during the import ends without a traceback.
        from gradwire.cli.front import run

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
