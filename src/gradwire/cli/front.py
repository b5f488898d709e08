"""From the arguments to a command, and how a command's errors end the program."""

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from gradwire.cli.arguments import explain_unknown, parse_command
from gradwire.cli.codecs import CodecsCommand
from gradwire.cli.compare import Choices, CompareCommand, DemoCommand
from gradwire.cli.console import WarningPrinter, errors
from gradwire.cli.defaults import default_config
from gradwire.cli.ending import with_notes
from gradwire.cli.launch import LaunchCommand, split_script
from gradwire.cli.listing import ListCommand
from gradwire.cli.matrix import MatrixCommand
from gradwire.cli.probe import ProbeCommand
from gradwire.cli.ps import PsCommand
from gradwire.cli.rd import RDCommand
from gradwire.cli.report import ReportCommand
from gradwire.cli.repro import ReproCommand
from gradwire.cli.run import RunCommand
from gradwire.cli.sweep import SweepCommand
from gradwire.cli.timeline import TimelineCommand, TimelineConfig
from gradwire.cli.values import check_values, given_options
from gradwire.core.errors import DataError, StoppedError
from gradwire.core.notation import nearest, unknown_name
from gradwire.experiment.processes.launch.signals import Interrupted
from gradwire.experiment.run.config import DIMENSION_NAMES, Config, both_lengths

_DESCRIPTION = (
    "Communication-efficient data-parallel training: simulate, measure, compare.\n\n"
    "`gradwire COMMAND --help` explains a command, `gradwire --version` prints the version."
)
_WITH_CONFIG = ("run", "compare", "timeline", "ps", "probe")


def run(arguments: list[str]) -> None:
    """Runs the command in the arguments; exits with a code if that fails."""
    before = warnings.showwarning
    warnings.showwarning = WarningPrinter(before)
    try:
        command(arguments)()
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stderr.close()
        sys.exit(141)
    except (ValueError, DataError, StoppedError, OSError) as error:
        errors.print(f"error: {with_notes(error)}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except Interrupted as stop:
        sys.exit(128 + stop.number)
    finally:
        warnings.showwarning = before


def command(argv: list[str]) -> Any:
    """The command that the arguments describe, ready to be called."""
    argv, script = split_script(argv)
    path, argv = _split_config(argv)
    name = argv[0] if argv else ""
    if path is not None and name not in _WITH_CONFIG and not name.startswith("-"):
        Config.from_toml(path)  # a missing file is reported first
        raise ValueError(f"--config goes with {', '.join(_WITH_CONFIG)}, not with {name or 'it'}")
    commands = _commands(path)
    if name in commands:
        check_values(name, commands[name], argv[1:])
        found, unknown = parse_command(f"gradwire {name}", commands[name], argv[1:])
        if unknown:
            raise ValueError(explain_unknown(name, commands[name], unknown))
        _check_length(found, argv[1:], path)
        return replace(found, script=script) if isinstance(found, LaunchCommand) else found
    if not name:
        raise ValueError(
            f"give a command: gradwire {', '.join(commands)}. gradwire --help explains each."
        )
    if name in ("-h", "--help") or name.startswith("--tyro-"):
        return _parse_all(commands, argv)
    if name.startswith("-"):
        if meant := nearest(name, ["--version", "--help"]):
            raise ValueError(f"unknown option {name}. Did you mean {meant}?")
        raise ValueError(
            f"{name} is given before the command: write gradwire run {name}. See gradwire --help."
        )
    raise ValueError(f"{unknown_name('command', name, list(commands))} See gradwire --help.")


def _check_length(command: Any, argv: list[str], path: Path | None) -> None:
    """Refuses `--epochs` together with a number of steps, which would have precedence."""
    options = dict(given_options(command, argv))
    if "epochs" not in options or not command.config.steps:
        return
    epochs = f"--epochs {command.config.epochs:g}"
    if "steps" in options:
        raise ValueError(both_lengths(f"--steps {command.config.steps}", epochs))
    message = both_lengths(f"steps = {command.config.steps} in {path}", epochs)
    raise ValueError(f"{message} With --steps 0 epochs count.")


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


def _commands(path: Path | None) -> dict[str, Any]:
    """All commands with their defaults; the file at `path` sets some of them."""
    settings = {} if path is None else vars(Config.from_toml(path))
    several: dict[str, Any] = {n: (v,) if n in DIMENSION_NAMES else v for n, v in settings.items()}
    timed: dict[str, Any] = {n: (v,) if n == "synchronization" else v for n, v in settings.items()}
    return {
        "run": RunCommand(default_config(path)),
        "compare": CompareCommand(Choices(**several)),
        "timeline": TimelineCommand(TimelineConfig(**timed)),
        "ps": PsCommand(config=default_config(path)),
        "launch": LaunchCommand(),
        "probe": ProbeCommand(default_config(path)),
        "sweep": SweepCommand(Path()),
        "repro": ReproCommand(),
        "report": ReportCommand(()),
        "matrix": MatrixCommand(),
        "codecs": CodecsCommand(),
        "rd": RDCommand(),
        "list": ListCommand(),
        "demo": DemoCommand(),
    }


def _parse_all(commands: dict[str, Any], argv: list[str]) -> Any:
    """Parses options before a command: help on all commands, scripts for shell completion."""
    choices = tuple(
        Annotated[type(default), tyro.conf.subcommand(name, default=default)]
        for name, default in commands.items()
    )
    union: Any = Union.__getitem__(choices)  # `A | B | ...`
    return parse_command("gradwire", None, argv, union, _DESCRIPTION)[0]
