"""What gradwire did in a user's loop: bytes and times, read off the engine.

`log_every(100)` prints a line after every hundredth step, on rank 0; with a SummaryWriter of
TensorBoard it also writes figures of the steps since the last line there. Under torch.profiler the
stages of an exchange have ranges whose names begin with "gradwire"; all but the waiting for means
are on the thread of the communicator, which a profile has with `profile_all_threads` only.
"""

import sys
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from gradwire.core.units import format_bytes
from gradwire.integration.communicator import Communicator

_ENCODING = ("encode", "statistic", "compress")  # functions whose names begin so


@dataclass(frozen=True)
class Stats:
    """Of this rank, since it began; times in seconds."""

    steps: int
    bytes_sent: int
    bytes_received: int
    dense_bytes: int  # that gradients have in their own dtype
    encode_s: float
    decode_s: float  # and average
    wait_s: float  # in which the exchange waited for messages
    exposed_s: float  # from the end of the backward pass until all means were there

    @property
    def ratio(self) -> float:
        """Bytes that an all-reduce of the gradients would send, to those that were sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else float("nan")

    def since(self, earlier: "Stats") -> "Stats":
        """Of the steps after those of another."""
        return Stats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Stats)))

    def __str__(self) -> str:
        steps = max(1, self.steps)
        is_compared = self.bytes_sent and self.dense_bytes  # one worker with servers: no all-reduce
        less = f" ({self.ratio:.3g}x less than an all-reduce)" if is_compared else ""
        return (
            f"{self.steps} steps, each: {format_bytes(self.bytes_sent / steps)} sent, "
            f"{format_bytes(self.bytes_received / steps)} received{less}, "
            f"{1e3 * self.encode_s / steps:.3g} ms encoding, "
            f"{1e3 * self.decode_s / steps:.3g} ms decoding, "
            f"{1e3 * self.wait_s / steps:.3g} ms waiting for messages, "
            f"{1e3 * self.exposed_s / steps:.3g} ms exposed communication"
        )


NO_STATS = Stats(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)


class _Logging(NamedTuple):
    every: int = 0  # steps; 0: never
    writer: Any = None


_logging = _Logging()


def log_every(steps: int, writer: Any = None) -> None:
    """Prints what was sent, and what that took, after every so many steps; 0: no longer.

    `writer`: a SummaryWriter of TensorBoard, or anything with `add_scalar(name, value, step)`.
    """
    global _logging
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"log_every takes a number of steps, or 0 for never, got {steps!r}")
    _logging = _Logging(steps, writer)


class Meter:
    """Counts what one hook, optimizer or context does."""

    def __init__(self) -> None:
        self._communicator: Communicator | None = None
        self._label = ""
        self._start = self._logged = NO_STATS
        self._steps = 0
        self._exposed_s = 0.0
        self._dense_nbytes = 0.0

    def begin(self, communicator: Communicator, label: str) -> None:
        """From now on exchanges whose tags begin with this label count.

        Times are those of the communicator's thread, which others may use as well.
        """
        self._communicator, self._label = communicator, label.partition("/")[0]
        self._start = self._counted()

    def add_bucket(self, x: Tensor) -> None:
        """A bucket will be exchanged."""
        assert self._communicator is not None
        size = self._communicator.size
        self._dense_nbytes += 2 * (size - 1) / size * x.numel() * x.element_size()

    def add_step(self, exposed_s: float) -> None:
        self._steps += 1
        self._exposed_s += exposed_s
        if _logging.every and self._steps % _logging.every == 0:
            assert self._communicator is not None
            if self._communicator.rank == 0:
                self._log(self.stats())

    def stats(self) -> Stats:
        return NO_STATS if self._communicator is None else self._counted().since(self._start)

    def _counted(self) -> Stats:
        assert self._communicator is not None
        engine = self._communicator.engine
        calls, traffic = dict(engine.call_s), engine.traffic[self._label]
        encode_s = sum(own for name, own in calls.items() if name.startswith(_ENCODING))
        return Stats(
            steps=self._steps,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            dense_bytes=round(self._dense_nbytes),
            encode_s=encode_s,
            decode_s=sum(calls.values()) - encode_s,
            wait_s=engine.wait_s,
            exposed_s=self._exposed_s,
        )

    def _log(self, stats: Stats) -> None:
        last, self._logged = stats.since(self._logged), stats
        print(f"gradwire, step {stats.steps}: {last}", file=sys.stderr, flush=True)
        if _logging.writer is not None:
            steps = max(1, last.steps)
            for field in fields(Stats)[1:]:
                value = getattr(last, field.name) / steps
                _logging.writer.add_scalar(f"gradwire/{field.name}", value, stats.steps)
