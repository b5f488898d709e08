"""The effects on the engine for real processes, with a transport within this process."""

import threading
from collections import defaultdict
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch

from gradwire.core.errors import PeerLost
from gradwire.core.node import Framed, Membership, Node
from gradwire.runtime.process import native_means
from gradwire.runtime.process.engine import ProcessEngine, StuckError
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.process.transport import ARRIVED, DONE, FINISHED, GOODBYE, LOST, Arrival

ONE = torch.ones(1)


class Within:
    """One end of a transport between threads."""

    def __init__(self, rank: int, queues: list[SimpleQueue[Arrival]]) -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues
        self._kept: defaultdict[int, list[Arrival]] = defaultdict(list)

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        self._queues[dst].put(Arrival(ARRIVED, self.rank, job, tag, message))

    def send_done(self, dst: int, job: int, number: int) -> None:
        self._queues[dst].put(Arrival(DONE, self.rank, job, number))

    def next(self, timeout_s: float | None) -> Arrival | None:
        try:
            return self._queues[self.rank].get(timeout_s != 0, timeout_s or None)
        except Empty:
            return None

    def defer(self, arrival: Arrival) -> None:
        self._kept[arrival.job].append(arrival)

    def deferred(self, job: int) -> list[Arrival]:
        return self._kept.pop(job, [])

    def happen(self, arrival: Arrival) -> None:
        self._queues[self.rank].put(arrival)


def transports(size: int) -> list[Within]:
    queues: list[SimpleQueue[Arrival]] = [SimpleQueue() for _ in range(size)]
    return [Within(rank, queues) for rank in range(size)]


@pytest.fixture
def transport() -> Within:
    """Rank 0 of three; the others are made up."""
    return transports(3)[0]


def came(src: int, tag: Any, message: Any, job: int = 0) -> Arrival:
    return Arrival(ARRIVED, src, job, tag_hash(tag), message)


def test_messages_by_sender_and_tag(transport: Within) -> None:
    async def program(node: Node) -> list[Any]:
        await node.send(0, "self", ONE)
        return [
            await node.recv(1, "b"),
            await node.recv(2, "a"),
            await node.recv(1, "a"),
            await node.recv(1, "a"),
            await node.recv(0, "self"),
            await node.recv_any("c"),
            await node.recv_each("c"),
        ]

    for src, tag, message in [(1, "a", 1), (1, "b", 2), (2, "c", 3), (1, "a", 4), (2, "a", 5)]:
        transport.happen(came(src, tag, message))
    transport.happen(came(1, "c", 6))
    engine = ProcessEngine(transport)
    assert engine.run(program) == [2, 5, 1, 4, ONE, (2, 3), (1, 6)]
    assert engine.ledger.total_messages == 0


def test_time(transport: Within) -> None:
    async def program(node: Node) -> list[Any]:
        start = await node.now()
        seen = [await node.recv_within("x", 0.0), await node.recv_within("x", 0.02)]
        waited = await node.now()
        await node.sleep(0.01)
        return [*seen, waited - start >= 0.02, await node.now() - waited >= 0.01]

    assert ProcessEngine(transport).run(program) == [None, None, True, True]


def test_a_message_in_time(transport: Within) -> None:
    threading.Timer(0.02, transport.happen, [came(1, "x", 7)]).start()

    async def program(node: Node) -> list[Any]:
        return [await node.recv_within("x", 20.0), await node.recv_within("x", 0.0)]

    assert ProcessEngine(transport).run(program) == [(1, 7), None]


def test_spawned_programs_take_turns(transport: Within) -> None:
    order = []

    async def child(node: Node, name: str) -> str:
        order.append(name)
        await node.sleep(0.0)
        order.append(name)
        return name

    async def program(node: Node) -> list[str]:
        tasks = [await node.spawn(child(node, name)) for name in "ab"]
        order.append("main")
        return [await node.join(task) for task in (*tasks, tasks[0])]

    assert ProcessEngine(transport).run(program) == ["a", "b", "a"]
    assert order == ["main", "a", "b", "a", "b"]


def test_what_can_be_sent_leaves_before_a_gradient_is_computed(transport: Within) -> None:
    order = []

    def evaluate(requests: list[Any]) -> list[Any]:
        order.append("computed")
        return [request + 1 for request in requests]

    async def child(node: Node) -> None:
        await node.send(1, "x", ONE, "tensor")
        order.append("sent")

    async def program(node: Node) -> int:
        await node.spawn(child(node))
        return await node.compute(41)

    engine = ProcessEngine(transport, evaluate=evaluate)
    assert engine.run(program) == 42
    assert order == ["sent", "computed"]
    assert engine.compute_s > 0
    assert engine.ledger.link_bytes[0] == [0, 4, 0]
    assert engine.ledger.tensor_bytes == {"tensor": 4}


def test_calls_are_timed(transport: Within) -> None:
    async def program(node: Node) -> int:
        return await node.call(max, 1, 2) + await node.share(max, 3, 4)

    engine = ProcessEngine(transport)
    assert engine.run(program) == 6
    assert engine.call_s.keys() == {"max"}


def test_errors_reach_the_program_and_carry_the_rank(transport: Within) -> None:
    async def program(node: Node) -> None:
        wrong = (node.send(3, "x", ONE), node.sleep(-1.0), node.recv_within("x", -1.0))
        for effect, what in zip(wrong, ("sends to 3", "below zero", "a timeout is")):
            with pytest.raises(ValueError, match=what):
                await effect
        with pytest.raises(ZeroDivisionError):
            await node.call(divmod, 1, 0)
        with pytest.raises(RuntimeError, match="without an evaluator"):
            await node.compute(1)
        with pytest.raises(ValueError, match="a tag is made of"):
            await node.send(1, b"tag", ONE)
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        ProcessEngine(transport).run(program)
    assert caught.value.__notes__[0].startswith("in the program of rank 0 at")


def test_two_programs_cannot_wait_for_the_same(transport: Within) -> None:
    async def child(node: Node) -> None:
        await node.recv(1, "x")

    async def program(node: Node) -> None:
        await node.spawn(child(node))
        await node.sleep(0.0)
        await node.recv(1, "x")

    with pytest.raises(RuntimeError, match="rank 0 already waits for 'x' from 1"):
        ProcessEngine(transport).run(program)


@pytest.mark.parametrize("is_late", [False, True])
def test_lost_ranks(transport: Within, is_late: bool) -> None:
    async def program(node: Node) -> Any:
        await node.watch("changes")
        before = await node.members()
        first = await node.recv(2, "x")  # what it sent before can be read
        with pytest.raises(PeerLost) as caught:
            await node.recv(2, "x")
        assert caught.value.rank == 2
        with pytest.raises(PeerLost):
            await node.recv(2, "y")
        await node.send(2, "x", ONE)  # goes nowhere
        return before, first, await node.recv_any("changes"), await node.members()

    def happen() -> None:
        transport.happen(came(2, "x", 5))
        transport.happen(Arrival(LOST, 2, message="connection reset"))

    if is_late:
        threading.Timer(0.02, happen).start()
    else:
        happen()
    before, first, news, after = ProcessEngine(transport).run(program)
    assert (before, first, after) == ({0, 1, 2}, 5, {0, 1})
    assert news == (0, Framed(Membership(2, False)))


def test_who_said_goodbye_is_not_lost_but_sends_nothing(transport: Within) -> None:
    transport.happen(Arrival(GOODBYE, 1))

    async def program(node: Node) -> Any:
        with pytest.raises(PeerLost):
            await node.recv(1, "x")
        return await node.members()

    assert ProcessEngine(transport).run(program) == {0, 1, 2}


def test_who_leaves_because_of_another_names_it(transport: Within) -> None:
    transport.happen(Arrival(GOODBYE, 1, tag=1 + 2))

    async def program(node: Node) -> Any:
        await node.recv(1, "x")

    with pytest.raises(PeerLost) as caught:
        ProcessEngine(transport).run(program)
    assert caught.value.rank == 2
    assert "rank 2: rank 1 reports it, and left because of it" in caught.value.__notes__


def test_without_progress_it_says_who_waits_for_what(transport: Within) -> None:
    async def child(node: Node) -> None:
        await node.recv_any(("any", 1))

    async def program(node: Node) -> None:
        await node.spawn(child(node))
        await node.recv(2, ("label", 3))

    transport.happen(came(1, "else", 1))
    with pytest.raises(StuckError) as caught:
        ProcessEngine(transport, timeout_s=0.05).run(program)
    text = str(caught.value)
    assert "nothing has happened for 0.05 s" in text
    assert "rank 0 waits for a message from rank 2, tag ('label', 3)" in text
    assert "rank 0 waits for a message from any rank, tag ('any', 1)" in text
    assert "unread message from rank 1" in text


def test_unread_messages_stay_for_the_next_run_but_not_for_the_next_job(transport: Within) -> None:
    async def program(node: Node) -> Any:
        return await node.recv(1, "x")

    async def poll(node: Node) -> Any:
        return await node.recv_within("x", 0.0)

    for number, job in ((1, 0), (2, 1), (3, 0), (4, 0)):
        transport.happen(came(1, "x", number, job))
    first = ProcessEngine(transport, job=0)
    assert [first.run(program), first.run(program)] == [1, 3]
    second = ProcessEngine(transport, job=1)
    assert [second.run(program), second.run(poll)] == [2, None]


def test_spawned_programs_serve_until_all_are_done() -> None:
    """And so do nodes that are no workers, whose programs do not end."""

    async def serve(node: Node, tag: str) -> None:
        while True:
            rank, x = await node.recv_any(tag)
            await node.send(rank, "answer", x + 1)

    async def worker(node: Node) -> Any:
        await node.spawn(serve(node, "ask a worker"))
        await node.sleep(0.03 * node.rank)  # rank 0 is done long before
        await node.send(0, "ask a worker", ONE)
        await node.send(2, "ask a server", 2 * ONE)
        return float(await node.recv(0, "answer") + await node.recv(2, "answer"))

    ends, results = transports(3), {}

    def run(rank: int) -> None:
        engine = ProcessEngine(ends[rank], 2, timeout_s=10)
        program = worker if rank < 2 else (lambda node: serve(node, "ask a server"))
        results[rank] = [engine.run(program) for _ in range(2)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {0: [5.0, 5.0], 1: [5.0, 5.0], 2: [None, None]}


def test_a_native_mean_that_comes_too_late_answers_nothing_else(
    transport: Within, monkeypatch
) -> None:
    """The program has been told that a rank is lost, and waits for something else."""
    monkeypatch.setattr(native_means, "_GRACE_S", 0.01)
    transport.native_mean = lambda x: 1  # type: ignore[attr-defined]

    async def program(node: Node) -> Any:
        transport.happen(Arrival(LOST, 1, message="it was killed"))
        with pytest.raises(PeerLost):
            await node.native_mean(ONE, [])
        transport.happen(Arrival(FINISHED, 0, tag=1, message=-ONE))
        transport.happen(came(2, "late", ONE))
        return await node.recv(2, "late")

    engine = ProcessEngine(transport, 3, native=True, timeout_s=5)
    for peer in (1, 2):
        transport.happen(Arrival(DONE, peer, 0, 1))
    assert torch.equal(engine.run(program), ONE)


def test_a_program_that_fails_leaves_nothing_to_go_on_from(transport) -> None:
    async def waits(node: Node) -> None:
        await node.recv(1, "more")

    async def fails(node: Node) -> None:
        await node.recv(1, "x")
        raise ValueError("in the middle of something")

    engine = ProcessEngine(transport, timeout_s=0.1)
    with pytest.raises(StuckError):
        engine.run(waits)
    assert engine.is_at_rest
    transport.happen(Arrival(ARRIVED, 1, 0, tag_hash("x"), ONE))
    with pytest.raises(ValueError, match="in the middle"):
        engine.run(fails)
    assert not engine.is_at_rest


@pytest.mark.parametrize("role", ["is done", "serves", "is patient"])
def test_who_has_nothing_to_do_waits_for_as_long_as_the_others_are_there(role) -> None:
    transport = transports(3)[2 if role == "serves" else 0]
    engine = ProcessEngine(transport, 2, timeout_s=0.05)
    calls = 0

    def glance() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # after some 0.3 s
            for peer in {0, 1} - {transport.rank}:
                transport.happen(Arrival(DONE, peer, 0, 1))
            transport.happen(Arrival(ARRIVED, 1, 0, tag_hash("x"), ONE))

    async def serves(node: Node) -> None:
        while True:
            await node.recv_any("request")

    async def is_done(node: Node) -> None:
        await node.spawn(serves(node))

    async def waits(node: Node) -> None:
        await node.recv(1, "x")

    async def waits_in_vain(node: Node) -> None:
        await node.recv(1, "y")

    engine.on_wait = glance
    if role == "is patient":
        engine.run(waits, serves=False, is_patient=True)
    else:
        engine.run(serves if role == "serves" else is_done)
    assert calls >= 4
    transport.happen(Arrival(GOODBYE, 1))
    with pytest.raises(PeerLost):
        engine.run(waits_in_vain, serves=False, is_patient=True)
