"""Nodes that are no workers, messages with headers, and waiting for no longer than that."""

import pytest
import torch

from gradwire.core.errors import DeadlockError
from gradwire.core.node import Framed, Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

ALPHA, BANDWIDTH = 0.25, 1000.0  # seconds, bytes per second


def network(size: int) -> Network:
    return Network((ALPHA,) * size, (BANDWIDTH,) * size)


def message(nbytes: int, fill: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


async def nothing(node: Node) -> None:
    pass


async def echo(node: Node) -> None:
    """A server: sends everything back, for ever."""
    while True:
        src, data = await node.recv_any("ask")
        await node.send(src, "answer", data)


async def asks(node: Node) -> float:
    for server in range(node.size, node.size + 2):
        await node.send(server, "ask", message(1000))
        await node.recv(server, "answer")
    return await node.now()


def test_servers_are_nodes_after_the_workers_and_need_not_end() -> None:
    engine = VirtualEngine(network(3), 1)
    assert engine.run([asks], [echo, echo]) == [4 * (ALPHA + 1.0)]
    assert engine.now == engine.clocks[0] == 5.0
    assert engine.ledger.link_bytes == [[0, 1000, 1000], [1000, 0, 0], [1000, 0, 0]]


def test_a_node_knows_the_number_of_workers() -> None:
    seen = []

    async def program(node: Node) -> int:
        seen.append((node.rank, node.size))
        return node.rank

    engine = VirtualEngine(network(3), 2)
    assert engine.run([program] * 2, [program]) == [0, 1]
    assert sorted(seen) == [(0, 2), (1, 2), (2, 2)]


def test_every_other_node_needs_a_daemon() -> None:
    with pytest.raises(AssertionError, match="0 daemons for 1 other nodes"):
        VirtualEngine(network(3), 2).run([nothing] * 2)
    with pytest.raises(AssertionError, match="4 workers on 3 nodes"):
        VirtualEngine(network(3), 4)


def test_daemons_and_spawned_programs_that_wait_are_closed() -> None:
    closed = []

    async def waits(node: Node) -> None:
        try:
            await node.recv_any("never")
        finally:
            closed.append(node.rank)

    async def worker(node: Node) -> None:
        await node.spawn(waits(node))

    VirtualEngine(network(3), 2).run([worker] * 2, [waits])
    assert sorted(closed) == [0, 1, 2]


def test_what_a_daemon_has_begun_it_ends() -> None:
    done = []

    async def slow(node: Node) -> None:
        _, data = await node.recv_any("push")
        await node.sleep(5.0)
        done.append(int(data[0]))

    async def worker(node: Node) -> None:
        await node.send(1, "push", message(1, 7))

    engine = VirtualEngine(network(2), 1)
    engine.run([worker], [slow])
    assert done == [7]
    assert engine.now == 0.0  # the worker did not wait for it


def test_a_worker_that_waits_for_a_daemon_that_waits_is_a_deadlock() -> None:
    async def worker(node: Node) -> None:
        await node.recv(1, "answer")

    with pytest.raises(DeadlockError) as caught:
        VirtualEngine(network(2), 1).run([worker], [echo])
    assert "rank 0 waits for a message from rank 1, tag 'answer'" in str(caught.value)
    assert "rank 1 waits for a message from any rank, tag 'ask'" in str(caught.value)


def test_an_error_in_a_daemon_says_whose_it_is() -> None:
    async def fails(node: Node) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        VirtualEngine(network(2), 1).run([nothing], [fails])
    assert caught.value.__notes__ == ["in the program of rank 1 at virtual time 0 s"]


def test_in_the_next_run_daemons_start_with_the_first_worker() -> None:
    starts = []

    async def daemon(node: Node) -> None:
        starts.append(await node.now())
        await node.recv_any("never")

    async def worker(node: Node) -> None:
        await node.sleep(1.0 + node.rank)

    engine = VirtualEngine(network(3), 2)
    for _ in range(3):
        engine.run([worker] * 2, [daemon])
    assert starts == [0.0, 1.0, 2.0]
    assert engine.now == 6.0


def test_work_is_shared_by_the_workers_only() -> None:
    calls = []

    def work(x: int) -> int:
        calls.append(x)
        return x + 1

    async def worker(node: Node) -> list[int]:
        return [await node.share(work, 1), await node.share(work, 2)]

    engine = VirtualEngine(network(4), 3)
    assert engine.run([worker] * 3, [nothing]) == [[2, 3]] * 3
    assert sorted(calls) == [1, 2]
    assert not engine._calls._shared  # all have asked


def test_a_replay_has_daemons_too() -> None:
    async def server(node: Node) -> None:
        while True:
            for worker in range(node.size):
                await node.recv(worker, "push")
            for worker in range(node.size):
                await node.send(worker, "pull", message(500))

    async def worker(node: Node) -> None:
        for _ in range(3):
            await node.sleep(0.5 * node.rank)
            await node.send(node.size, "push", message(100))
            await node.recv(node.size, "pull")

    recording = VirtualEngine(network(4), 3, record=True)
    recording.run([worker] * 3, [server])
    assert recording.trace is not None
    assert recording.trace.replayable
    other = Network((0.1,) * 4, (50.0, 500.0, 700.0, 90.0))
    for net in (network(4), other):
        replayed, direct = VirtualEngine(net, 3), VirtualEngine(net, 3)
        replayed.run([recording.trace.replay] * 3, [recording.trace.replay])
        direct.run([worker] * 3, [server])
        assert replayed.clocks == direct.clocks
        assert replayed.ledger.snapshot() == recording.ledger.snapshot()


# Headers


def test_a_header_travels_with_its_message_and_is_counted() -> None:
    sent = Framed((3, "x"), message(900))

    async def sender(node: Node) -> None:
        await node.send_framed(1, "x", sent, 100, "weight")
        await node.send_framed(1, "x", Framed("only a header"), 50)

    async def receiver(node: Node) -> tuple:
        first = await node.recv(0, "x")
        then = await node.now()
        return first, then, await node.recv_any("x")

    engine = VirtualEngine(network(2))
    first, then, second = engine.run([sender, receiver])[1]
    assert first is sent
    assert then == ALPHA + 1.0
    assert second == (0, Framed("only a header", None))
    assert engine.ledger.tensor_bytes == {"weight": 1000, "": 50}


# Timeouts


def test_waiting_ends_with_the_message_or_with_the_time() -> None:
    async def sender(node: Node) -> None:
        await node.sleep(3.0)
        await node.send(1, "x", message(1000, 5))

    async def receiver(node: Node) -> list:
        seen = []
        for seconds in (1.0, 2.0, 10.0, 1.0):
            answer = await node.recv_within("x", seconds)
            seen.append((await node.now(), answer and (answer[0], int(answer[1][0]))))
        return seen

    engine = VirtualEngine(network(2))
    arrival = 3.0 + ALPHA + 1.0
    expected = [(1.0, None), (3.0, None), (arrival, (0, 5)), (arrival + 1.0, None)]
    assert engine.run([sender, receiver])[1] == expected
    assert engine.clocks[1] == arrival + 1.0  # the timeout that was not needed took no time


def test_a_message_that_comes_at_the_last_moment_is_in_time() -> None:
    async def sender(node: Node) -> None:
        await node.send(1, "x", message(1000))

    async def receiver(node: Node) -> bool:
        return await node.recv_within("x", ALPHA + 1.0) is not None

    assert VirtualEngine(network(2)).run([sender, receiver]) == [None, True]


def test_a_poll_takes_what_is_there_and_does_not_wait() -> None:
    async def sender(node: Node) -> None:
        for fill in (1, 2):
            await node.send(1, "x", message(1000, fill))

    async def receiver(node: Node) -> list:
        seen = [await node.recv_within("x", 0.0)]
        await node.sleep(10.0)
        for _ in range(3):
            answer = await node.recv_within("x", 0.0)
            seen.append(answer and int(answer[1][0]))
        return [*seen, await node.now()]

    assert VirtualEngine(network(2)).run([sender, receiver])[1] == [None, 1, 2, None, 10.0]


def test_an_old_timeout_does_not_end_a_new_wait() -> None:
    async def sender(node: Node) -> None:
        await node.send(1, "x", message(0))

    async def receiver(node: Node) -> tuple:
        within = node.recv_within("x", 2.0)  # one effect, awaited twice
        first = await within
        return first is not None, await within, await node.now()

    assert VirtualEngine(network(2)).run([sender, receiver])[1] == (True, None, ALPHA + 2.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds(seconds) -> None:
    async def program(node: Node) -> None:
        await node.recv_within("x", seconds)

    with pytest.raises(ValueError, match="a timeout is finite and >= 0"):
        VirtualEngine(network(1)).run([program])


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_timeouts_make_a_run_depend_on_time(seconds) -> None:
    async def program(node: Node) -> None:
        await node.recv_within("x", seconds)

    engine = VirtualEngine(network(1), record=True)
    engine.run([program])
    assert engine.trace is not None
    assert not engine.trace.replayable


def test_a_daemon_that_waits_again_and_again_does_not_go_on_for_ever() -> None:
    rounds = []

    async def server(node: Node) -> None:
        held = 0
        while True:
            if await node.recv_within("push", 1.0) is None:
                rounds.append((await node.now(), held))
                held = 0
            else:
                held += 1

    async def worker(node: Node) -> None:
        await node.sleep(1.5)
        await node.send(1, "push", message(0))

    VirtualEngine(network(2), 1).run([worker], [server])
    # The last round is closed even though the worker is done by then.
    assert rounds == [(1.0, 0), (1.75 + 1.0, 1)]


def test_a_daemon_that_waits_again_and_again_hides_no_deadlock(monkeypatch) -> None:
    monkeypatch.setattr("gradwire.runtime.virtual.engine._MAX_FUTILE", 100)

    async def server(node: Node) -> None:
        while True:
            await node.recv_within("push", 1.0)

    async def worker(node: Node) -> None:
        await node.recv(1, "answer")

    with pytest.raises(DeadlockError, match="rank 0 waits for a message from rank 1"):
        VirtualEngine(network(2), 1).run([worker], [server])


def test_without_faults_everybody_is_a_member_and_nobody_is_told() -> None:
    async def worker(node: Node) -> tuple:
        await node.watch("who")
        return await node.members(), await node.recv_within("who", 5.0)

    engine = VirtualEngine(network(3), 2)
    assert engine.run([worker] * 2, [worker]) == [(frozenset({0, 1}), None)] * 2
    assert engine.alive == {0, 1}
