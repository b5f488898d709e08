"""What was refused, and why: counted by reason, logged once per reason and peer."""

import logging
from collections import Counter

from gradwire.core.errors import WireError

_log = logging.getLogger(__name__)
_MAX_LOGGED = 1000  # strangers must not fill the log, nor the memory


class Refusal(WireError):
    """A message that is dropped. The reason is one of few."""

    def __init__(self, reason: str, detail: str, code: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.code = code


class Refusals:
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
