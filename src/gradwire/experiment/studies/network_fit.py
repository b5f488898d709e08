"""The network for which simulated exchanges take as long as measured ones.

Latency, bandwidth and burst cannot be read off a clock: a message also takes processor time, of
which a part runs while the network carries it, and ranks compete for cores. So the programs that
measured the ranks (`processor.py`) run on the simulator, with the measured costs of messages, and
each parameter is the one for which its exchange takes as long as between the ranks:

- the latency from short messages between two ranks, while the others wait,
- the bandwidth from what a message between two ranks takes longer than one of half the length, and
  the burst from what it takes: buckets are filled in between,
- a lower bandwidth if steps take longer in which all exchange long messages with all: flows share
  links unevenly.

Of messages between two ranks the fastest counts, which no other work disturbed: all cores of the
machine are there for it.

A latency that hides behind what threads do with messages cannot be found, and makes no difference.
Nothing of the runs that are predicted goes into it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gradwire.core.node import Node
from gradwire.experiment.studies.processor import (
    LONG,
    PAIR_REPEATS,
    PAIRS,
    Cost,
    Processor,
    layer_shares,
    pair_row,
    step_row,
)
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.host import Cores
from gradwire.runtime.virtual.sharing import SharedEngine

_STEPS = 30  # of a bisection
_NUM_STEPS = 6  # that are simulated
_LATENCIES = 1e-6, 1.0  # seconds
_BANDWIDTHS = 1e4, 1e11  # bytes per second
_SLOWNESSES = 1 / _BANDWIDTHS[1], 1 / _BANDWIDTHS[0]
_LEAST_BURST = 1000  # bytes; less is noise


@dataclass(frozen=True)
class Calibrated:
    """The parameters of the simulator's network and host."""

    host: Cores
    latency_s: float
    bandwidth: float
    burst: int


def host_of(processor: Processor) -> Cores:
    def cost(own: Cost) -> Cost:
        return _rounded(own[0]), _rounded(own[1])

    return Cores(
        _rounded(processor.cores),
        cost(processor.send),
        cost(processor.receive),
        cost(processor.transfer),
        cost(processor.wake),
    )


def calibrate(processor: Processor, size: int) -> Calibrated:
    """The parameters for which the simulator needs as long as `size` ranks."""
    host = host_of(processor)

    def network(latency_s: float, bandwidth: float, burst: float) -> Network:
        return Network((latency_s,) * size, (bandwidth,) * size, burst=round(burst))

    async def gradient(node: Node) -> None:
        await node.compute(None)

    def long_step_s(latency_s: float, bandwidth: float, burst: float) -> float:
        engine = SharedEngine(
            host,
            network(latency_s, bandwidth, burst),
            evaluate=lambda requests: requests,
            seconds=lambda rank, request: processor.gradient_s,
        )
        program = partial(step_row, nbytes=LONG, repeats=_NUM_STEPS, gradient=gradient)
        return sum(engine.run([program] * size)) / size

    def pair_s(nbytes: int, latency_s: float, bandwidth: float, burst: float) -> float:
        undisturbed = replace(host, count=max(host.count, processor.machine_cores))
        engine = SharedEngine(undisturbed, network(latency_s, bandwidth, burst))
        program = partial(pair_row, nbytes=nbytes, repeats=PAIR_REPEATS)
        return float(engine.run([program] * size)[0])

    short, half, whole = PAIRS
    short_s, half_s, whole_s = processor.pairs_s
    latency_s = _solve(lambda x: pair_s(short, x, _BANDWIDTHS[1], 0.0), short_s, _LATENCIES)
    longer_s = max(whole_s - half_s, whole_s / 10)  # less is a matter of chance
    slowness = _solve(
        lambda x: pair_s(whole, latency_s, 1 / x, 0.0) - pair_s(half, latency_s, 1 / x, 0.0),
        longer_s,
        _SLOWNESSES,
    )
    rest = _solve(  # bytes that do not fit into the bucket
        lambda x: pair_s(whole, latency_s, 1 / slowness, whole - x), whole_s, (1.0, whole)
    )
    burst = round(whole - rest) if whole - rest >= _LEAST_BURST else 0
    if long_step_s(latency_s, 1 / slowness, burst) < processor.long.step_s:
        slowness = _solve(
            lambda x: long_step_s(latency_s, 1 / x, burst),
            processor.long.step_s,
            (slowness, _SLOWNESSES[1]),
        )
    return Calibrated(host, _rounded(latency_s), 1 / slowness, burst)


def settings_on_cores(
    processor: Processor, found: Calibrated, size: int, overlaps: bool
) -> dict[str, Any]:
    """As settings of `Config`, for a schedule that overlaps or for others."""
    forward, backward = (_listed(times) for times in layer_shares(processor.layers_s))
    compute_s = processor.layers_s[-1] if overlaps else processor.gradient_s
    return {
        "workers": size,
        "bandwidth": f"{8e-6 * found.bandwidth:.4f}Mbit",
        "latency": f"{1e6 * found.latency_s:.1f}us",
        "burst": found.burst,
        "host": repr(found.host),
        "compute": f"fixed({compute_s:.4g})",
        "layer_times": f"given({forward}, backward={backward})",
        "coding": "measured",
        "coding_slowdown": round(processor.slowdown, 3),
    }


def _listed(seconds: Sequence[float]) -> str:
    return repr(tuple(_rounded(own) for own in seconds))


def _solve(f: Callable[[float], float], target: float, limits: tuple[float, float]) -> float:
    """x within the limits for which f(x), which grows with it, is nearest to the target."""
    low, high = limits
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        if f(middle) < target:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
