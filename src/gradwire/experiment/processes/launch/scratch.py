"""A temporary folder that is removed when its process ends, also by SIGKILL.

Keys of a job, settings and reports of ranks live in such folders. A shell waits on a pipe from the
process; the pipe closes when the process ends, and the shell removes the folder.
"""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# A rank that is being killed may still write a file. Then the folder is not empty: try again.
_REMOVE_AT_END_OF_INPUT = """
trap '' HUP INT TERM
while read -r _; do :; done
for _ in 1 2 3 4 5; do rm -rf -- "$1" && exit; sleep 1; done
"""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that only this user can read, until the end of the block or of this process."""
    folder = Path(tempfile.mkdtemp(prefix="gradwire-"))
    try:
        remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE_AT_END_OF_INPUT, "gradwire-scratch", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # signals from a terminal are not for it
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        assert remover.stdin is not None
        remover.stdin.close()
        remover.wait()
