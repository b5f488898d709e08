"""Replaces itself by the command of a user: `python -m gradwire.experiment.processes.launch.command
python train.py`.

The launcher starts workers through this, so that they are killed when it ends, however it ends, and
so that the variables of its own nodes do not reach them.
"""

import os
import signal
import sys

from gradwire.experiment.processes.launch.children import die_with_parent, forget_launcher

NOT_FOUND = 127  # as in a shell


def main() -> None:
    command = sys.argv[1:]
    die_with_parent()
    forget_launcher()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see `signals.held`
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_FOUND)


if __name__ == "__main__":
    main()
