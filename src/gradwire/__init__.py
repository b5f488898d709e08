"""Communication-efficient data-parallel training: every technique, real bytes, one simulator."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gradwire")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0+unknown"

from gradwire.experiment.config import Config
from gradwire.experiment.runner import Run, resume, simulate

__all__ = ["Config", "Run", "__version__", "resume", "simulate"]
