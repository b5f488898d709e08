"""Errors of a node in its job, and messages that a node refuses."""

import logging
from collections import Counter

from gradwire.core.errors import WireError

_log = logging.getLogger(__name__)
_MAX_LOGGED = 1000  # strangers must not fill the log, nor the memory


class JoinError(RuntimeError):
    """A node could not join the job, or the job did not become complete."""


class NotAdmittedError(JoinError):
    """The scheduler refuses this node: it is of another job, or asks for a rank it cannot have."""


class NoMemberError(RuntimeError):
    """This node was declared lost, or replaced by another process; it cannot continue."""


class Refusal(WireError):
    """A message that is dropped. `reason` is one of a few words, by which refusals are counted."""

    def __init__(self, reason: str, detail: str, code: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.code = code


class RefusalLog:
    """Counts refusals by reason, and logs each reason once per peer."""

    def __init__(self, name: str) -> None:
        self.counts: Counter[str] = Counter()
        self._name = name
        self._logged: set[tuple[str, object]] = set()

    def add(self, reason: str, peer: object, text: str, what: str = "message") -> None:
        self.counts[reason] += 1
        key = (reason, peer)
        if key not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(key)
            _log.warning("%s dropped a %s from %s: %s", self._name, what, peer, text)
