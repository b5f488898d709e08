"""Communication-efficient data-parallel training: every technique, real bytes, one simulator."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradwire")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"

from typing import TYPE_CHECKING, Any

from gradwire.experiment.config import Config
from gradwire.experiment.outcome import Run
from gradwire.experiment.runner import resume, simulate

if TYPE_CHECKING:
    from gradwire.experiment.processes import run

__all__ = ["Config", "Run", "__version__", "resume", "run", "simulate"]


def __getattr__(name: str) -> Any:
    if name == "run":  # what real processes need is imported where they are
        from gradwire.experiment.processes import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
