"""The command line: `gradwire run`, `compare`, `matrix`, `codecs`, `rd`, `list`, `demo`.

One command per file. Every command prints machine-readable output with `--json`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from gradwire.cli.codecs import CodecsCommand
from gradwire.cli.compare import Choices, CompareCommand, DemoCommand
from gradwire.cli.console import errors
from gradwire.cli.listing import ListCommand
from gradwire.cli.matrix import MatrixCommand
from gradwire.cli.probe import ProbeCommand
from gradwire.cli.processes import usual_config
from gradwire.cli.ps import PsCommand
from gradwire.cli.rd import RDCommand
from gradwire.cli.run import RunCommand
from gradwire.core.errors import DataError, StoppedError
from gradwire.experiment.config import Config
from gradwire.experiment.setup import DIMENSIONS
from gradwire.experiment.signals import Interrupted
from gradwire.runtime.storage.files import explain


def _split_config(argv: list[str]) -> tuple[Path | None, list[str]]:
    """Takes `--config FILE` out of the arguments."""
    for position, argument in enumerate(argv):
        name, equals, path = argument.partition("=")
        if name != "--config":
            continue
        after = position + (1 if equals else 2)
        if not equals:
            path = argv[position + 1] if position + 1 < len(argv) else ""
        if not path:
            raise ValueError("--config needs a file: gradwire run --config experiment.toml")
        return Path(path), argv[:position] + argv[after:]
    return None, argv


def _command(argv: list[str]) -> Any:
    """The command that the arguments describe, ready to be called."""
    path, argv = _split_config(argv)
    # Its settings become the defaults.
    settings = {} if path is None else vars(Config.from_toml(path))
    if settings and argv and argv[0] not in ("run", "compare", "ps", "probe"):
        raise ValueError(f"--config goes with run, compare, ps and probe, not with {argv[0]}")
    several: dict[str, Any] = {n: (v,) if n in DIMENSIONS else v for n, v in settings.items()}
    commands = {
        "run": RunCommand(usual_config(path)),
        "compare": CompareCommand(Choices(**several)),
        "ps": PsCommand(config=usual_config(path)),
        "probe": ProbeCommand(usual_config(path)),
        "matrix": MatrixCommand(),
        "codecs": CodecsCommand(),
        "rd": RDCommand(),
        "list": ListCommand(),
        "demo": DemoCommand(),
    }
    choices = tuple(
        Annotated[type(default), tyro.conf.subcommand(name, default=default)]
        for name, default in commands.items()
    )
    union: Any = Union.__getitem__(choices)  # `A | B`, for a number of them known at run time
    return tyro.cli(
        union,
        prog="gradwire",
        description="Communication-efficient data-parallel training: simulate, measure, compare.",
        args=argv,
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.FlagCreatePairsOff,
        ),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `gradwire` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _command(arguments)()
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        sys.exit(141)
    except (ValueError, DataError, StoppedError, OSError) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        text = f"error: {explain(error)}{notes}"
        errors.print(text, style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Interrupted as stop:
        sys.exit(128 + stop.number)
