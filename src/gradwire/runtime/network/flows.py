"""Messages that share links: max-min fair rates (Bertsekas and Gallager 1992, sec. 6.5.2).

A message is a flow of bytes over all links of its route at once. Flows that share a link divide
its bandwidth fairly, as TCP connections do; what one of them cannot use, since another link of its
route is slower, goes to the others. Messages between the same two nodes follow one another, those
of a higher priority first. Uncontended, a message of s bytes takes
latency + s / (least bandwidth), as on a switch.
"""

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from gradwire.runtime.network.fabric import Fabric

_NOTHING = 1e-9  # relative: bytes that remain of a message because of rounding


@dataclass(eq=False, slots=True)
class Flow:
    """A message under way."""

    src: int
    dst: int
    nbytes: float
    priority: int
    what: Any
    left: float = 0.0  # bytes that have not been sent
    rate: float = 0.0
    route: tuple[int, ...] = ()
    cap: float = np.inf


@dataclass(slots=True)
class _Pair:
    """Messages from one node to another: one flows, the others wait."""

    active: Flow | None = None
    waiting: list[tuple[int, int, Flow]] = field(default_factory=list)


class Flows:
    """All messages in a fabric. Time only moves forward."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.now = 0.0
        self._bandwidth = np.array([link.bandwidth for link in fabric.links])
        self._pairs: dict[tuple[int, int], _Pair] = {}
        self._numbers = count()
        self._active: list[Flow] = []
        self._is_stale = False  # whether flows came or left since rates were computed
        self._background = [
            Flow(one.src, one.dst, np.inf, 0, None, np.inf, 0.0, route, one.bandwidth)
            for one in fabric.background
            if (route := fabric.routes[one.src][one.dst])
        ]

    def start(self, now: float, flow: Flow) -> None:
        """A message leaves, or waits for those before it."""
        if self._active:
            self._advance(now)
        else:
            self.now = now
        flow.left = float(flow.nbytes)
        flow.route = self.fabric.routes[flow.src][flow.dst]
        pair = self._pairs.setdefault((flow.src, flow.dst), _Pair())
        if pair.active is None:
            self._activate(pair, flow)
        else:
            heappush(pair.waiting, (-flow.priority, next(self._numbers), flow))

    def finish(self, now: float) -> list[Flow]:
        """The messages whose last bit has left by now."""
        self._advance(now)
        # Less than moves in the shortest time that can be added to the clock is nothing, too.
        moment = math.ulp(now)
        done = [
            flow
            for flow in self._active
            if flow.left <= max(_NOTHING * max(flow.nbytes, 1.0), flow.rate * moment)
        ]
        if done:
            ended = set(map(id, done))
            self._active = [flow for flow in self._active if id(flow) not in ended]
            self._is_stale = True
            for flow in done:
                pair = self._pairs[flow.src, flow.dst]
                pair.active = None
                if pair.waiting:
                    self._activate(pair, heappop(pair.waiting)[2])
        return done

    def next_finish(self) -> float | None:
        """When the next message ends, if none comes before."""
        if not self._active:
            return None
        if self._is_stale:
            self._share()
        return self.now + min(flow.left / flow.rate for flow in self._active)

    def drop(self, now: float, ranks: set[int]) -> list[Flow]:
        """Forgets the messages from and to these nodes, and returns them."""
        self._advance(now)
        dropped = []
        for (src, dst), pair in self._pairs.items():
            if src in ranks or dst in ranks:
                dropped += [flow for _, _, flow in pair.waiting]
                pair.waiting.clear()
                if pair.active is not None:
                    dropped.append(pair.active)
                    pair.active = None
        gone = set(map(id, dropped))
        self._active = [flow for flow in self._active if id(flow) not in gone]
        self._is_stale = True
        return dropped

    def _activate(self, pair: _Pair, flow: Flow) -> None:
        pair.active = flow
        self._active.append(flow)
        self._is_stale = True

    def _advance(self, now: float) -> None:
        passed = now - self.now
        if passed > 0.0:
            if self._is_stale and self._active:
                self._share()
            for flow in self._active:
                flow.left = max(0.0, flow.left - flow.rate * passed)
            self.now = now

    def _share(self) -> None:
        """Max-min fair rates: fill all flows alike until a link is full, again and again."""
        self._is_stale = False
        left = self._bandwidth.copy()
        flows = [*self._active, *self._background]
        # Each use of a link by a flow.
        owner = np.repeat(np.arange(len(flows)), [len(flow.route) for flow in flows])
        used = np.concatenate([np.array(flow.route) for flow in flows])
        caps = np.array([flow.cap for flow in flows])
        rates = np.zeros(len(flows))
        is_open = np.ones(len(flows), dtype=bool)
        while is_open.any():
            uses = np.bincount(used[is_open[owner]], minlength=len(left))
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.where(uses > 0, left / uses, np.inf)
            # The share of a flow is that of the scarcest link on its route, or its cap.
            own = caps.copy()
            np.minimum.at(own, owner, share[used])
            own[~is_open] = np.inf
            least = own.min()
            full = is_open & (own <= least * (1 + 1e-12))
            rates[full] = least
            np.subtract.at(left, used[full[owner]], least)
            np.maximum(left, 0.0, out=left)
            is_open &= ~full
        for flow, rate in zip(flows, rates.tolist()):
            flow.rate = rate
