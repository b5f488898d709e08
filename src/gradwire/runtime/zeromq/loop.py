"""The loop of a node: it does what is due, waits for its sockets and reads them."""

import time

from gradwire.runtime.zeromq.connections.wire import Wire
from gradwire.runtime.zeromq.links.traffic import Traffic
from gradwire.runtime.zeromq.membership.views import MemberView, SchedulerView

_TICK_S = 0.1


class Loop:
    """Of one node. Only the thread whose turn it is with the sockets runs it (turns.py)."""

    def __init__(
        self, wire: Wire, view: SchedulerView | MemberView, traffic: Traffic, heartbeat_s: float
    ) -> None:
        self.failure: Exception | None = None  # why this node cannot continue
        self._wire, self._view, self._traffic = wire, view, traffic
        self._heartbeat_s = heartbeat_s
        self._tick_s = time.monotonic()

    def once(self, timeout_s: float) -> None:
        """Does what is due, waits for the sockets, and reads them."""
        now = time.monotonic()
        if now >= self._tick_s:
            self._view.tick(now)
            self._traffic.tick()
            self._tick_s = now + min(_TICK_S, self._heartbeat_s / 8)
        due = min(self._tick_s, self._traffic.run_due(now))
        self._wire.poll(min(timeout_s, due - now))

    def stand_in(self, timeout_s: float) -> None:
        """The same while the caller is away; `check` raises its errors when the caller is back."""
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
