"""What nodes run on: lanes of their own, or threads on cores that they share.

With `lanes`, the default, a node computes gradients and codes side by side, and messages take no
time of a processor: nodes are machines with an accelerator and cores to spare.

`cores(2)` is one machine with two cores on which all nodes run as real processes do
(`runtime/process/engine.py`):

- A node has one thread for gradients, coding and messages. Coding and messages come first; a layer
  that has begun is not interrupted.
- Sending and receiving a message takes that thread a time, and a second thread of the node, which
  moves the bytes, another one. Bytes are moved while the network carries them: a message is there
  when all are done. Threads that wait for a message take longer, since they must wake up.
- The threads of all nodes share the cores (`cores.py`).
- A forward pass starts layer by layer as parameters arrive. With `forward` "whole" it begins when
  all are there, as under vmap evaluation.

`compute` and the costs of coding are then seconds of a core.
"""

import math
from abc import ABC
from dataclasses import dataclass
from typing import Literal, get_args

from gradwire.core.notation import Expression, unknown_name
from gradwire.core.registry import Registry

Forward = Literal["whole", "layers"]


class Host(Expression, ABC):
    """What nodes run on."""


@dataclass(frozen=True, repr=False)
class Lanes(Host):
    """Each node has a lane for gradients and one for coding; messages take no processor time."""


@dataclass(frozen=True, repr=False)
class Cores(Host):
    """All nodes share the cores of one machine. Costs are (seconds, seconds per byte)."""

    count: float  # of which others may use a part
    send: tuple[float, float] = (0.0, 0.0)  # of the node's thread, for each message
    receive: tuple[float, float] = (0.0, 0.0)  # likewise
    # Of the other thread: for each message at its receiver, and for each byte at both ends.
    transfer: tuple[float, float] = (0.0, 0.0)
    wake: tuple[float, float] = (0.0, 0.0)  # seconds more, of each thread, if it has waited
    forward: Forward = "layers"  # "whole": a forward pass waits for all parameters

    examples = ("cores(2)", "cores(2, send=(5e-05, 1e-10), receive=(4e-05, 1e-10))")

    def __post_init__(self) -> None:
        if not 0 < self.count < math.inf:
            raise ValueError(f"{self!r}: the number of cores must be above 0")
        for name in ("send", "receive", "transfer", "wake"):
            costs = getattr(self, name)
            if len(costs) != 2 or not all(0 <= cost < math.inf for cost in costs):
                raise ValueError(f"cores: {name} is two times, both at least 0, got {costs}")
        if self.forward not in get_args(Forward):
            raise ValueError(unknown_name("forward", str(self.forward), list(get_args(Forward))))


HOST: Registry[Host] = Registry("host", Host, __name__, group="gradwire.host")
