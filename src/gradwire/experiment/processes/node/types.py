"""What a node of a run on real processes is given, and what it keeps of a step."""

from pathlib import Path
from typing import NamedTuple, Protocol

from gradwire.runtime.process.transport import Transport


class CountingTransport(Transport, Protocol):
    """A transport that counts what it sends."""

    @property
    def num_bytes_sent(self) -> int: ...


class RunFolder(NamedTuple):
    """The folder of a run, and whether the run in it continues."""

    folder: Path | None
    resumes: bool = False
    is_restart: bool = False  # whether this is another attempt of the same run
    may_restart: bool = False  # whether it may begin again if its checkpoints cannot be used


class StepFigures(NamedTuple):
    """What a worker keeps of a step after which the model is evaluated later."""

    time_s: float
    num_bytes: int  # that it had sent
    loss: float | None
    num_dropped: int
