"""How a process of a run with several ends: with an exit code; one of them prints the reason.

Exit codes: 0 done; 2 wrong settings or files; 3 a rank was lost or nothing happened for too long;
1 anything unexpected; 128 + n stopped by signal n, with a checkpoint.
"""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from gradwire.cli.console import errors
from gradwire.core.errors import DataError, LostError, StoppedError
from gradwire.experiment.processes.launch.children import (
    LOST,
    WRONG,
    die_with_parent,
    is_launched,
    report,
)
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.runtime.storage.files import explain

FINISHED = "this run had finished; nothing was computed"
_END_LIMIT_S = 30.0  # how long a process may take to end when it must end at once


def end_with(
    work: Callable[[Signals], None], shows: Callable[[BaseException], bool] = lambda error: True
) -> NoReturn:
    """Does the work and ends this process without teardown, in which gloo may abort.

    `shows`: whether this is the process that prints the error.
    """
    code = 1
    try:
        if is_launched():
            die_with_parent()
        with Signals(_end_soon).caught() as signals:
            code = _code(work, signals, shows)
    except Interrupted as stop:  # before or after the work
        code = _fail("signal", str(stop), 128 + stop.number, shows(stop))
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextmanager
def stopping(advice: Callable[[], str]) -> Iterator[Signals]:
    """For work in this process only: SIGTERM and Ctrl-C end it, and `advice` is printed."""
    try:
        with Signals().caught() as signals:
            yield signals
    except (KeyboardInterrupt, Interrupted):
        if text := advice():
            errors.print(text, markup=False, highlight=False, soft_wrap=True)
        raise


def _end_soon() -> None:
    """Ends this process after a while, with a traceback, even if it hangs."""
    faulthandler.dump_traceback_later(_END_LIMIT_S, exit=True)


def _code(
    work: Callable[[Signals], None], signals: Signals, shows: Callable[[BaseException], bool]
) -> int:
    try:
        work(signals)
        return 0
    except Interrupted as stop:
        return _fail("signal", str(stop), 128 + stop.number, shows(stop))
    except LostError as error:
        return _fail("lost", with_notes(error, but="in the program of "), LOST, shows(error))
    except TimeoutError as error:
        return _fail("lost", f"the ranks did not find each other: {error}", LOST, shows(error))
    except (ValueError, DataError, StoppedError, OSError) as error:
        return _fail("error", with_notes(error), WRONG, shows(error))
    except Exception:
        return _fail("error", traceback.format_exc(), 1, True)


def _fail(kind: str, message: str, code: int, shows: bool) -> int:
    if is_launched():
        report(kind, message, code)
    elif shows:
        say(message if kind == "signal" else f"error: {message}")
    return code


def with_notes(error: BaseException, but: str = "\0") -> str:
    """The message of an error with its notes, except those that begin with `but`."""
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(but)]
    return "\n".join([explain(error), *notes])


def say(text: str) -> None:
    errors.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
