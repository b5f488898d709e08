"""Parses arguments with tyro, with own messages for errors where tyro's show its internals.

tyro reports a ValueError of a dataclass as an error of one of its own fields; here the message of
the dataclass is shown. For an unknown option the nearest known one is proposed, or what to write
instead of an option of another library.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import tyro

from gradwire.core.notation import nearest
from gradwire.experiment.run.advice import advice

_OPTIONS = (
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.FlagCreatePairsOff,
)


def parse_command(
    prog: str, default: Any, argv: list[str], kind: Any = None, description: str | None = None
) -> tuple[Any, list[str]]:
    """The command with the settings in the arguments, and the arguments that it does not know."""
    printed = io.StringIO()
    more: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(printed):
            found: tuple[Any, list[str]] = tyro.cli(
                type(default) if kind is None else kind,
                prog=prog,
                description=description,
                args=argv,
                config=_OPTIONS,
                return_unknown_args=True,
                **more,
            )
    except SystemExit as stop:
        if stop.code:
            _raise_own(stop, prog)
        sys.stderr.write(printed.getvalue())
        raise
    sys.stderr.write(printed.getvalue())
    return found


def _raise_own(stop: BaseException, prog: str) -> None:
    """Raises the error of a dataclass of this package that tyro has reworded."""
    seen: BaseException | None = stop
    while seen is not None:
        if isinstance(seen, ValueError) and _is_ours(seen):
            raise ValueError(f"{seen}. See {prog} --help.") from None
        seen = seen.__context__


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised in this package, and not by a conversion such as int("x")."""
    last, here = error.__traceback__, __name__.partition(".")[0]
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__", "").startswith(f"{here}.")


def explain_unknown(name: str, default: Any, unknown: list[str]) -> str:
    """The message for the first argument that a command does not know."""
    first, see = unknown[0], f"See gradwire {name} --help."
    if not first.startswith("-"):
        return f"gradwire {name} does not know what {first!r} is: settings begin with --. {see}"
    option = first.partition("=")[0].lstrip("-").replace("-", "_")
    known = list(_settings(default))
    written = advice(option) if {"optimizer", "compute"} <= set(known) else None
    near = nearest(option, known)
    hint = written or (f"Did you mean --{near.replace('_', '-')}?" if near else "")
    if option in known:  # a flag that is set unless its opposite is given
        hint = f"This is the default; --no-{option.replace('_', '-')} is the opposite."
    message = (f"gradwire {name} has no {first.partition('=')[0]}.", hint, see)
    return " ".join(filter(None, message))


def _settings(command: Any) -> Iterator[str]:
    """The names of its options, including those of a configuration inside it."""
    for field in fields(command):
        value = getattr(command, field.name)
        if is_dataclass(value):
            yield from _settings(value)
        else:
            yield field.name
