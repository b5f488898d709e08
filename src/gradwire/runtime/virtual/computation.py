"""When the layers of a gradient are done in virtual time.

A forward pass may wait for parameters: each layer starts when the one before it has ended and its
parameters are there. The backward pass follows without a pause, last layer first.
"""

from itertools import pairwise
from typing import Any

from gradwire.core.node import Computation
from gradwire.core.profile import Profile
from gradwire.runtime.virtual.gradients import PendingGradient


class LayerTimes:
    """The shares of a gradient's time that its layers take.

    Without a profile there is one layer.
    """

    def __init__(self, profile: Profile | None) -> None:
        if profile is None:
            self.forward, self.backward_ends = [0.0], [1.0]
        else:
            ends = profile.forward_ends()
            self.forward = [ends[0], *(after - before for before, after in pairwise(ends))]
            self.backward_ends = profile.backward_ends()
        self.forward_share = sum(self.forward)


class VirtualComputation(Computation):
    """A gradient under way on a virtual node."""

    __slots__ = ("_at", "_began", "_next", "_opened", "_times", "gradient", "seconds", "waiting")

    def __init__(self, times: LayerTimes, seconds: float, now: float, is_open: bool) -> None:
        self._times = times
        self.seconds = seconds
        self.gradient: PendingGradient | None = None
        self.waiting: list[tuple[Any, int]] = []  # programs and layers, while the forward waits
        self._began = now
        self._at = now  # when the layers before `_next` have passed
        self._opened: dict[int, float] = {}
        self._next = 0  # the layer whose forward pass comes next
        if is_open:
            self._at += seconds * times.forward_share
            self._next = len(times.forward)

    @property
    def is_forward_done(self) -> bool:
        """Whether it is known when the forward pass ends."""
        return self._next == len(self._times.forward)

    def open(self, layer: int, now: float) -> None:
        """The parameters of a layer are there."""
        self._opened[layer] = now
        forward = self._times.forward
        while not self.is_forward_done and self._next in self._opened:
            self._at = max(self._at, self._opened[self._next]) + self.seconds * forward[self._next]
            self._next += 1

    def reached_s(self, layer: int) -> float:
        """When the backward pass leaves a layer."""
        assert self.is_forward_done, "the backward pass begins after the forward pass"
        times = self._times
        return self._at + self.seconds * (times.backward_ends[layer] - times.forward_share)

    def passes(self) -> list[tuple[bool, int, float, float]]:
        """Whether backward, which layer, and from when to when; all passes of all layers."""
        assert self.is_forward_done, "it is not known yet when the forward pass ends"
        forward, found, at = self._times.forward, [], self._began
        for layer, share in enumerate(forward):
            start = max(at, self._opened.get(layer, at))
            at = start + self.seconds * share
            if share:
                found.append((False, layer, start, at))
        at = self._at
        for layer in reversed(range(len(forward))):
            end = self.reached_s(layer)
            found.append((True, layer, at, end))
            at = end
        return found
