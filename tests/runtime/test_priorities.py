"""NICs that serve by priority."""

import pytest
import torch

from gradwire.core.node import Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

NETWORK = Network((0.0, 0.0), (1000.0, 1000.0))


def order(priorities: list[int], **settings) -> list[tuple[int, float]]:
    """Which of messages of one second arrives when; all are sent at once."""
    arrivals = []

    async def send(node: Node, number: int) -> None:
        await node.send(1, ("x", number), torch.zeros(1000, dtype=torch.uint8))

    async def receive(node: Node, number: int) -> None:
        await node.recv(0, ("x", number))
        arrivals.append((number, await node.now()))

    async def program(node: Node) -> None:
        tasks = [
            await node.spawn(
                send(node, number) if node.rank == 0 else receive(node, number), priority
            )
            for number, priority in enumerate(priorities)
        ]
        for task in tasks:
            await node.join(task)

    VirtualEngine(NETWORK, **settings).run([program] * 2)
    return arrivals


def test_what_waits_leaves_by_priority():
    """The first one has left already when the others come."""
    found = order([0, 0, 5, 1], has_priorities=True)
    assert found == [(0, 1.0), (2, 2.0), (3, 3.0), (1, 4.0)]


@pytest.mark.parametrize("faults", [[], ["loss(0.0001)"]])
def test_equal_priorities_leave_in_order(faults):
    expected = order([0] * 5, faults=faults)
    assert expected == [(number, number + 1.0) for number in range(5)]
    assert order([3] * 5, has_priorities=True, faults=faults) == expected


def test_without_them_messages_leave_in_order():
    assert [number for number, _ in order([0, 0, 5, 1])] == [0, 1, 2, 3]
