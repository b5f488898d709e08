"""The errors for users. Each says what was given, what was expected and what to do."""

from gradwire.warning import GradwireWarning as GradwireWarning  # exported


class UnfedWarning(GradwireWarning):
    """A biased compression without error feedback."""


class NotationError(ValueError):
    """An expression such as `topk(0.01)` that cannot be understood."""


class WireError(ValueError):
    """Bytes that are not a payload of the expected codec and tensor."""


class NonFiniteError(ValueError):
    """NaN or Inf where a finite tensor was expected."""


class DeadlockError(RuntimeError):
    """Every program waits for a message that will never be sent."""


class PeerLost(RuntimeError):
    """A worker that others wait for is gone."""

    def __init__(self, rank: int, crashed_s: float | None, noticed_s: float) -> None:
        if crashed_s is None:
            text = f"rank {rank} is not there yet"
        elif crashed_s == noticed_s:  # a process whose connection broke
            text = (
                f"rank {rank} is gone, which was noticed at {noticed_s:.6g} s: it crashed, or "
                "ended while others wait for it. Do all ranks take the same number of steps?"
            )
        else:
            text = (
                f"rank {rank} crashed at {crashed_s:.6g} s, which was noticed at {noticed_s:.6g} s"
            )
        super().__init__(text)
        self.rank = rank
        self.crashed_s = crashed_s
        self.noticed_s = noticed_s


class StoppedError(RuntimeError):
    """A run that could not continue; the message says in which step."""


class LostError(StoppedError):
    """A run that stopped because a rank is gone or nothing happens any more."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank  # that was lost


class RefusedError(ValueError):
    """All ranks of a run get this if one of them cannot run it."""


class DifferentSettingsError(RefusedError):
    """Ranks have different settings; the message of each rank names its own."""


class WhatIfError(ValueError):
    """A run whose messages depend on the network, so its time on another one is not known."""


class DataError(RuntimeError):
    """A data set that is missing or damaged, with what to put where."""
