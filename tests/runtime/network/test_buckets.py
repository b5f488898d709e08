"""Token buckets against closed forms. Bandwidth 1000 bytes per second, latency 0.1 s."""

from dataclasses import replace

import pytest
import torch

from gradwire.runtime.network.network import Network
from gradwire.runtime.spans import SpanLog
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.runtime.virtual.spans import VirtualSpans

RATE, LATENCY, BURST = 1000.0, 0.1, 300


def network(size: int, burst: int = BURST) -> Network:
    return replace(Network((LATENCY,) * size, (RATE,) * size), burst=burst)


def arrivals(sizes: list[int], pauses: list[float], burst: int = BURST) -> list[float]:
    """When messages of so many bytes arrive, each sent so long after the one before."""

    async def sender(node):
        for nbytes, pause in zip(sizes, pauses):
            await node.sleep(pause)
            await node.send(1, "x", torch.zeros(nbytes, dtype=torch.uint8))

    async def receiver(node):
        times = []
        for _ in sizes:
            await node.recv(0, "x")
            times.append(await node.now())
        return times

    return VirtualEngine(network(2, burst)).run([sender, receiver])[1]


@pytest.mark.parametrize("nbytes", [1, 299, 300, 301, 1000])
def test_on_an_idle_link_a_message_takes_what_the_bucket_does_not_hold(nbytes):
    expected = LATENCY + max(0, nbytes - BURST) / RATE
    assert arrivals([nbytes], [0.0]) == pytest.approx([expected])


def test_messages_right_behind_each_other_share_the_bucket():
    expected = [LATENCY, LATENCY + (400 - BURST) / RATE, LATENCY + (600 - BURST) / RATE]
    assert arrivals([200, 200, 200], [0.0] * 3) == pytest.approx(expected)


def test_a_pause_fills_the_bucket_at_the_rate_and_no_further():
    # 300 bytes empty it. After 0.2 s it holds 200, after 10 s 300 and no more.
    expected = [LATENCY, 0.2 + LATENCY + 100 / RATE, 10.3 + LATENCY + 100 / RATE]
    assert arrivals([300, 300, 400], [0.0, 0.2, 10.1]) == pytest.approx(expected)


def test_in_the_long_run_the_bandwidth_holds():
    times = arrivals([500] * 100, [0.0] * 100)
    assert times[-1] == pytest.approx(LATENCY + (50_000 - BURST) / RATE)


def test_the_receiver_has_a_bucket_too():
    """Two senders at once: each passes its own bucket, then they share the receiver's."""

    async def sender(node):
        await node.send(2, "x", torch.zeros(300, dtype=torch.uint8))

    async def receiver(node):
        for rank in range(2):
            await node.recv(rank, "x")
        return await node.now()

    time = VirtualEngine(network(3)).run([sender, sender, receiver])[2]
    assert time == pytest.approx(LATENCY + (600 - BURST) / RATE)


def test_without_a_burst_times_are_those_of_nics():
    sizes, pauses = [200, 500, 1, 700], [0.0, 0.1, 0.0, 2.0]
    tiny = arrivals(sizes, pauses, burst=1)
    assert arrivals(sizes, pauses, burst=0) == pytest.approx(tiny, abs=1.5 / RATE)


def test_a_bucket_survives_a_checkpoint():
    async def sender(node):
        await node.send(1, "x", torch.zeros(300, dtype=torch.uint8))

    async def receiver(node):
        await node.recv(0, "x")

    first, second = VirtualEngine(network(2)), VirtualEngine(network(2))
    first.run([sender, receiver])
    second.restore(first.snapshot())
    for engine in (first, second):
        engine.run([sender, receiver])
        # Rank 0 was done at 0, so nothing has been filled since.
        assert engine.now == pytest.approx(LATENCY + 300 / RATE)


def test_in_a_timeline_what_the_bucket_holds_leaves_at_once():
    async def program(node):
        if node.rank == 0:
            await node.send(1, "x", torch.zeros(500, dtype=torch.uint8))
        else:
            await node.recv(0, "x")

    log = SpanLog(2, 2)
    engine = VirtualEngine(network(2))
    engine.run([program] * 2, spans=VirtualSpans(log, network(2), []))
    sent, received = log.spans
    assert (sent.start_s, sent.end_s) == pytest.approx((0.0, (500 - BURST) / RATE))
    assert (received.start_s, received.end_s) == pytest.approx((LATENCY, LATENCY + sent.end_s))
