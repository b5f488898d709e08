"""Orders of workers to servers that form means, and the answers that are not tensors.

All are plain values, so that they can be sent. A server does not trust an order: it is checked here
as far as possible, and if a job fails on messages that do not belong to it, all members receive the
error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torch import Tensor

from gradwire.core.errors import PeerLost, WireError
from gradwire.core.group import Aggregation, Merging, maximum, mean_in_order
from gradwire.core.limits import Limits, is_valid, specs_in
from gradwire.core.wire import Failed as Failed

_MAX_NBYTES = 1 << 32  # of a tensor that is decoded for a member, where the model is not known


@dataclass(frozen=True)
class Order:
    """The header of a message to a server: the job to run on the messages of all members."""

    label: str
    round: int  # of the exchanges of this tensor
    members: tuple[int, ...]
    job: Aggregation | None  # None: hand the message on
    to: tuple[int, ...] = ()  # to these

    def check(self, rank: int, num_workers: int) -> None:
        """Refuses what `rank` cannot order."""
        members = set(self.members)
        if len(members) < len(self.members) or not members <= set(range(num_workers)):
            what = f"an exchange among {self.members}, but there are workers 0 .. {num_workers - 1}"
        elif rank not in members:
            what = f"an exchange among {self.members}, of which it is none"
        elif not set(self.to) <= members - {rank} or len(set(self.to)) < len(self.to):
            what = f"that something is handed on to {self.to}, not to others of {self.members}"
        elif (self.job is None) != bool(self.to):
            what = "neither a job nor that something is handed on, or both"
        elif not _is_bounded(self.job):
            what = f"a job on a tensor beyond the limit of {_MAX_NBYTES} bytes: {self.job!r:.200}"
        else:
            return
        raise WireError(f"rank {rank} ordered {what} (tensor {self.label!r}, round {self.round})")

    def check_limits(self, rank: int, num_workers: int, limits: Limits, nbytes: int) -> None:
        """Refuses orders that exceed the limits of the job; the message has `nbytes`."""
        try:
            if self.members != tuple(range(num_workers)):
                raise WireError(
                    f"an exchange among {self.members}, but all exchanges of this job are among "
                    f"its {num_workers} workers"
                )
            limits.check_message(self.label, nbytes)
            limits.check_job(self.label, self.job)
        except WireError as error:
            raise WireError(f"an order of rank {rank} is refused: {error}") from None

    @property
    def digest(self) -> int:
        """Equal for members that ordered the same job."""
        digest = blake2b(repr(self.job).encode("utf-8", "replace"), digest_size=7).digest()
        return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Lost:
    """The header of an answer that will not come: a member is gone."""

    rank: int
    crashed_s: float | None
    noticed_s: float

    @staticmethod
    def of(error: PeerLost) -> "Lost":
        return Lost(error.rank, error.crashed_s, error.noticed_s)

    def error(self) -> Exception:
        return PeerLost(self.rank, self.crashed_s, self.noticed_s)


@dataclass(frozen=True)
class MeanOfVectors(Aggregation):
    def run(self, messages: tuple[Tensor, ...], state: Any) -> tuple[Tensor, Any]:
        _check_same_kind(messages)
        if not messages[0].is_floating_point():
            raise WireError(f"a server got {messages[0].dtype}, of which there is no mean")
        return mean_in_order(messages, len(messages)), None


@dataclass(frozen=True)
class Maximum(Aggregation):
    def run(self, messages: tuple[Tensor, ...], state: Any) -> tuple[Tensor, Any]:
        _check_same_kind(messages)
        return maximum(messages), None


@dataclass(frozen=True)
class MergeInPairs(Aggregation):
    """Merges as a binomial tree does, so that the result is the same."""

    merging: Merging

    def run(self, messages: tuple[Tensor, ...], state: Any) -> tuple[Tensor, Any]:
        level = list(messages)
        while len(level) > 1:
            pairs = [self.merging.merge(a, b) for a, b in zip(level[::2], level[1::2])]
            level = pairs + level[len(pairs) * 2 :]
        return self.merging.finalize(level[0]), None


def _is_bounded(job: Any) -> bool:
    """Whether the tensors that a job is about could be in a message."""
    return all(
        is_valid(spec) and spec.numel * spec.dtype.itemsize <= _MAX_NBYTES for spec in specs_in(job)
    )


def _check_same_kind(messages: Sequence[Tensor]) -> None:
    """What is added must be vectors of one kind."""
    first = messages[0]
    for message in messages:
        if (message.shape, message.dtype) != (first.shape, first.dtype):
            raise WireError(
                f"a server got {tuple(message.shape)} {message.dtype} for a tensor of which it "
                f"also got {tuple(first.shape)} {first.dtype}; all workers must send the same"
            )
