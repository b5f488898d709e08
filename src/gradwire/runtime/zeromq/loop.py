"""What a node does over and over: what is due, then it waits for its sockets and reads them."""

import time

from gradwire.runtime.zeromq.members import Desk, Member
from gradwire.runtime.zeromq.traffic import Traffic
from gradwire.runtime.zeromq.wire import Wire

_TICK_S = 0.1


class Loop:
    """Of one node. Whoever goes through it has its turn with the sockets (turns.py)."""

    def __init__(
        self, wire: Wire, members: Desk | Member, traffic: Traffic, heartbeat_s: float
    ) -> None:
        self.failure: Exception | None = None  # why this node cannot go on
        self._wire, self._members, self._traffic = wire, members, traffic
        self._heartbeat_s = heartbeat_s
        self._tick_s = time.monotonic()

    def once(self, timeout_s: float) -> None:
        """Does what is due, waits for the sockets, and reads them."""
        now = time.monotonic()
        if now >= self._tick_s:
            self._members.tick(now)
            self._traffic.tick()
            self._tick_s = now + min(_TICK_S, self._heartbeat_s / 8)
        due = min(self._tick_s, self._traffic.do_what_is_due(now))
        self._wire.poll(min(timeout_s, due - now))

    def stand_in(self, timeout_s: float) -> None:
        """The same while the caller is away, which is told of what goes wrong when it is back."""
        if self.failure is not None:
            time.sleep(0.01)
            return
        try:
            self.once(timeout_s)
        except Exception as error:
            self.failure = error

    def fail(self, failure: Exception) -> None:
        self.failure = failure

    def check(self) -> None:
        """Raises what went wrong."""
        if self.failure is not None:
            raise self.failure
