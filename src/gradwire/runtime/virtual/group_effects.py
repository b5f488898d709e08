"""Exchanges and passes: effects of groups that an engine answers in C, or refuses."""

from array import array
from collections.abc import Callable
from typing import Any

from gradwire.core.node import Call, Exchange, Pass
from gradwire.kernels.native.passes import Rings
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.interpreter.interpreter import Handler, Task
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.network.network import Nics
from gradwire.runtime.virtual.events import Events
from gradwire.runtime.virtual.exchanges import Exchanges
from gradwire.runtime.virtual.late_calls import LateCalls
from gradwire.runtime.virtual.passes import Passes


class GroupEffects:
    """Those under way. `calls_free`: when each node has finished its calls; `release` evaluates the
    calls that are held."""

    def __init__(
        self,
        nics: Nics,
        ledger: Ledger,
        events: Events,
        calls_free: "array[float]",
        calls: Calls,
        release: Callable[[], None],
    ) -> None:
        price = calls.price if isinstance(calls, LateCalls) else _unknown
        rings = Rings(
            nics.egress_free,
            nics.ingress_free,
            nics.delivered,
            nics.bandwidth,
            nics.latency_s,
            calls_free,
        )
        self.exchanges = Exchanges(nics, ledger, events)
        self.passes = Passes(rings, ledger, events, price, release)

    @property
    def handlers(self) -> dict[type, Handler]:
        return {Exchange: self.exchanges.post, Pass: self.passes.post}

    def clear(self) -> None:
        """The run is over: forgets what is under way."""
        self.exchanges.clear()
        self.passes.clear()


def refusals() -> dict[type, Handler]:
    """Where the messages of exchanges and passes are sent one by one."""
    return {Exchange: _refuse, Pass: _refuse}


def _unknown(call: Call[Any]) -> None:
    """What a call takes is known when it has been made."""


def _refuse(task: Task, effect: Any) -> None:
    """None is the answer."""
