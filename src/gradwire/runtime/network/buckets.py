"""NICs with a token bucket, such as `tc tbf` makes (Turner 1986).

A bucket holds up to `burst` tokens, one for each byte, and is filled at the bandwidth. Bytes for
which there are tokens pass at once, others as the bucket is filled. So on an idle network a message
of s bytes takes latency + max(0, s - burst) / bandwidth, and two that are sent at once
latency + max(0, 2 s - burst) / bandwidth; in the long run the bandwidth holds.

A bucket is kept as the time at which it would have been empty and filled since: at most
burst / bandwidth before now (the virtual scheduling algorithm of ITU-T I.371).
"""

from collections import deque
from collections.abc import Sequence

from gradwire.runtime.network.network import Network, Nics


class BucketNics(Nics):
    """NICs of which each direction has a bucket, full at first."""

    __slots__ = ("_burst_s", "_egress", "_ingress", "_last_bits")

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._burst_s = [network.burst / bandwidth for bandwidth in network.bandwidth]
        # When each bucket was empty, had it been filled without a limit since.
        self._egress = [-seconds for seconds in self._burst_s]
        self._ingress = [-seconds for seconds in self._burst_s]
        # When the last bits of the messages of each node reach their receivers.
        self._last_bits: list[deque[float]] = [deque() for _ in self._burst_s]

    def leave(self, now: float, src: int, nbytes: int) -> float:
        start = max(now, self.egress_free[src])
        empty = max(self._egress[src], start - self._burst_s[src])
        self._egress[src] = empty + nbytes / self.bandwidth[src]
        left = self.egress_free[src] = max(start, self._egress[src])
        self._last_bits[src].append(left + self.latency_s[src])
        return start + self.latency_s[src]

    def arrive(self, now: float, src: int, dst: int, nbytes: int) -> float:
        empty = max(self._ingress[dst], now - self._burst_s[dst])
        self._ingress[dst] = empty + nbytes / self.bandwidth[dst]
        done = self.ingress_free[dst] = max(now, self._ingress[dst])
        pair = dst * self._size + src
        # Messages of one node arrive in the order in which they left it.
        arrival = max(done, self._last_bits[src].popleft(), self.delivered[pair])
        self.delivered[pair] = arrival
        return arrival

    def snapshot(self) -> dict[str, list[float]]:
        buckets = {"egress": list(self._egress), "ingress": list(self._ingress)}
        return {**super().snapshot(), **buckets}

    def restore(self, saved: dict[str, Sequence[float]]) -> None:
        super().restore(saved)
        self._egress, self._ingress = list(saved["egress"]), list(saved["ingress"])
