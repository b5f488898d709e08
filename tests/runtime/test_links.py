"""Messages that get lost and are sent again."""

import math

import pytest
import torch

from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.runtime.network.faults import Loss
from gradwire.runtime.network.links import Links
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

ALPHA, BANDWIDTH = 0.25, 1000.0  # seconds, bytes per second


def network(size: int) -> Network:
    return Network((ALPHA,) * size, (BANDWIDTH,) * size)


def message(nbytes: int, fill: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


async def nothing(node: Node) -> None:
    pass


def lose(monkeypatch, lost: dict[tuple[int, int], list[int]]) -> None:
    """Lets so many attempts of each link's messages get lost; none of further messages."""
    left = {link: list(counts) for link, counts in lost.items()}

    def num_lost(self: Links, src: int, dst: int) -> int:
        return left[src, dst].pop(0) if left.get((src, dst)) else 0

    monkeypatch.setattr(Links, "_num_lost", num_lost)


async def receives(node: Node) -> list:
    """When each of three messages came, and which it was."""
    seen = []
    for _ in range(3):
        data = await node.recv(0, "x")
        seen.append((await node.now(), int(data[0])))
    return seen


async def sends(node: Node) -> None:
    for fill in range(3):
        for dst in range(1, node.size):
            await node.send(dst, "x", message(1000, fill), "w")


def test_a_lost_message_is_sent_again_and_later_ones_wait_for_it(monkeypatch) -> None:
    lose(monkeypatch, {(0, 1): [1]})
    engine = VirtualEngine(network(2), faults=["loss(0.5, timeout=5.0)"])
    # The first attempt leaves at 1 s, the second 5 s later: the others were there long before.
    arrival = 1.0 + 5.0 + ALPHA + 1.0
    assert engine.run([sends, receives])[1] == [(arrival, 0), (arrival, 1), (arrival, 2)]
    assert engine.ledger.link_bytes == [[0, 4000], [0, 0]]
    assert engine.ledger.link_messages == [[0, 4], [0, 0]]
    assert engine.ledger.tensor_bytes == {"w": 4000}
    assert engine.nics.egress_free[0] == 7.0


def test_a_loss_in_the_middle_holds_up_only_what_comes_after(monkeypatch) -> None:
    lose(monkeypatch, {(0, 1): [0, 2, 0]})
    engine = VirtualEngine(network(2), faults=["loss(0.5, timeout=5.0)"])
    second = 2.0 + 5.0 + 1.0 + 5.0 + ALPHA + 1.0
    assert engine.run([sends, receives])[1] == [(ALPHA + 1.0, 0), (second, 1), (second, 2)]
    assert engine.ledger.total_bytes == 5000


def test_other_links_are_not_held_up(monkeypatch) -> None:
    lose(monkeypatch, {(0, 1): [1]})
    engine = VirtualEngine(network(3), faults=["loss(0.5, timeout=5.0)"])
    results = engine.run([sends, receives, receives])
    assert results[2] == [(ALPHA + 2.0 * k, k - 1) for k in (1, 2, 3)]
    # Six messages occupy the NIC until 6 s; the attempt lost at 1 s goes again then.
    assert results[1] == [(6.0 + ALPHA + 1.0, k) for k in range(3)]


def test_a_second_attempt_occupies_the_nic(monkeypatch) -> None:
    lose(monkeypatch, {(0, 1): [1]})

    async def sender(node: Node) -> None:
        await node.send(1, "x", message(2000))
        await node.sleep(2.0 + 1.0 + 0.5)  # the second attempt has begun
        await node.send(2, "y", message(1000))

    async def other(node: Node) -> float:
        await node.recv(0, "y")
        return await node.now()

    engine = VirtualEngine(network(3), faults=["loss(0.5, timeout=1.0)"])
    assert engine.run([sender, nothing, other])[2] == 2.0 + 1.0 + 2.0 + ALPHA + 1.0


def test_a_node_does_not_lose_what_it_sends_to_itself(monkeypatch) -> None:
    lose(monkeypatch, {(0, 0): [9]})

    async def program(node: Node) -> float:
        await node.send(0, "x", message(1000))
        await node.recv(0, "x")
        return await node.now()

    engine = VirtualEngine(network(1), faults=["loss(0.5)"])
    assert engine.run([program]) == [0.0]
    assert engine.ledger.total_bytes == 0


def test_draws_are_named_by_link_and_message() -> None:
    links = [Links(3, Loss(0.4), Key(seed)) for seed in (1, 1, 2)]
    first = [links[0]._num_lost(0, 1) for _ in range(600)]
    links[1]._num_lost(1, 0)  # another link does not matter
    assert [links[1]._num_lost(0, 1) for _ in range(600)] == first
    assert [links[2]._num_lost(0, 1) for _ in range(600)] != first
    assert [links[0]._num_lost(1, 0) for _ in range(600)] != first
    again = Links(3, Loss(0.4), Key(1))
    for _ in range(300):
        again._num_lost(0, 1)
    resumed = Links(3, Loss(0.4), Key(1))
    resumed.restore(again.snapshot())
    assert [resumed._num_lost(0, 1) for _ in range(300)] == first[300:]


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_each_attempt_is_lost_with_the_probability(probability) -> None:
    links = Links(2, Loss(probability), Key(3))
    num = 20_000
    counts = [links._num_lost(0, 1) for _ in range(num)]
    for k in (1, 2, 3):
        share = sum(count >= k for count in counts) / num
        expected = probability**k
        assert abs(share - expected) < 6 * math.sqrt(expected * (1 - expected) / num)


def lossy_times(probability: float, seed: int = 0) -> tuple[list, int]:
    async def program(node: Node) -> list[float]:
        times = []
        for step in range(20):
            for peer in range(node.size):
                if peer != node.rank:
                    await node.send(peer, "x", message(100, step))
            for peer in range(node.size):
                if peer != node.rank:
                    assert int((await node.recv(peer, "x"))[0]) == step  # in order
            times.append(await node.now())
        return times

    engine = VirtualEngine(network(4), faults=[Loss(probability)], key=Key(seed))
    return engine.run([program] * 4), engine.ledger.total_messages


def test_a_lossy_run_is_the_same_every_time_and_nothing_is_missing() -> None:
    assert lossy_times(0.3) == lossy_times(0.3)
    assert lossy_times(0.3) != lossy_times(0.3, seed=1)
    times, num_messages = lossy_times(0.3)
    assert times > lossy_times(0.0)[0]
    assert num_messages > 1.2 * lossy_times(0.0)[1] == 1.2 * 240


def test_a_probability_of_zero_changes_nothing() -> None:
    engine, plain = VirtualEngine(network(2), faults=["loss(0.0)"]), VirtualEngine(network(2))
    assert engine.run([sends, receives]) == plain.run([sends, receives])
    assert engine.clocks == plain.clocks
    assert engine.ledger.snapshot() == plain.ledger.snapshot()


def test_a_lossy_run_can_be_replayed_on_another_lossy_network() -> None:
    async def receiver(node: Node) -> None:
        for _ in range(3):
            await node.recv(0, "x")

    fast = Network((0.1,) * 2, (5000.0,) * 2)
    recording = VirtualEngine(network(2), faults=["loss(0.7)"], record=True)
    recording.run([sends, receiver])
    assert recording.trace is not None
    replayed, direct = (VirtualEngine(fast, faults=["loss(0.7)"]) for _ in range(2))
    replayed.run([recording.trace.replay] * 2)
    direct.run([sends, receiver])
    assert replayed.clocks == direct.clocks
