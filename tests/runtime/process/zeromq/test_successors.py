"""What is sent to a worker does not reach the next one of its rank, of which the sender has not
read yet."""

import threading
from types import SimpleNamespace
from typing import Any

import torch

from gradwire.runtime.process.transport import ARRIVED, GOODBYE, JOINED, LOST, Arrival
from gradwire.runtime.zeromq import ZmqTransport
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.links.inbox import Delivery, Inbox
from gradwire.runtime.zeromq.links.link import OutgoingMessage
from gradwire.runtime.zeromq.links.sender import Sender
from runtime.process.zeromq.jobs import Job, crash, job, next_of, wait_until
from runtime.process.zeromq.test_traffic import SERVER as RANK
from runtime.process.zeromq.test_traffic import make, resume

SERVER, SCHEDULER = 2, 3  # of a job with two workers and a server


def succeed(made: Job) -> ZmqTransport:
    """Another process takes the place of worker 0; the others have not read of it."""
    old = made.nodes[0]
    others = [made.nodes[rank] for rank in (1, SERVER, SCHEDULER)]
    crash(old)
    made.all.remove(old)
    new = made.start("worker", rank=0)
    for node in others:
        wait_until(lambda node=node: node._inbox.is_succeeded(0))
    return new


def test_answers_to_the_one_before() -> None:
    with job(2) as made:
        others = [made.nodes[rank] for rank in (1, SERVER, SCHEDULER)]
        for node in others:
            made.nodes[0].send(node.rank, 0, 0, torch.tensor([1]))
        for node in others:
            wait_until(lambda node=node: node._inbox._deliveries)
        new = succeed(made)
        for node in others:  # worker 1 speaks by way of the scheduler
            assert next_of(node).kind == ARRIVED
            node.send(0, 0, 0, torch.tensor([1]))
            assert next_of(node).kind == LOST
            node.send(0, 0, 0, torch.tensor([2]))
            assert next_of(node).kind == JOINED
            node.send(0, 0, 0, torch.tensor([3]))
        got = [next_of(new) for _ in others]
        assert [(one.kind, int(one.message)) for one in got] == [(ARRIVED, 3)] * 3
        assert {one.src for one in got} == {1, SERVER, SCHEDULER}
        assert new.next(0.0) is None


def test_who_leaves_says_so_to_all_that_are_there() -> None:
    with job(2) as made:
        new = succeed(made)
        closers = [threading.Thread(target=made.nodes[rank].close) for rank in (1, SERVER)]
        for closer in closers:
            closer.start()
        assert {next_of(new, GOODBYE).src for _ in closers} == {1, SERVER}
        for closer in closers:
            closer.join()


def test_what_others_send_by_way_of_one_that_has_not_read() -> None:
    with job(2) as made:
        new = succeed(made)
        assert next_of(made.nodes[1], JOINED).src == 0
        made.nodes[1].send(0, 0, 0, torch.tensor([4]))
        assert int(next_of(new).message) == 4


def test_a_server_that_begins_again_knows_who_is_there() -> None:
    """What it says again has the same numbers, whatever it is told anew."""
    with job(2) as made:
        server = made.nodes[SERVER]
        new = succeed(made)
        assert next_of(server, JOINED).src == 0
        for value in (1, 2):
            server.send(0, 0, 0, torch.tensor([value]))
            assert int(next_of(new).message) == value
        state = server.links()
        crash(server)
        made.all.remove(server)
        begun = {**state, 0: (new.incarnation, 0, 1)}
        again = made.start("server", rank=SERVER, links=begun, acknowledges="asked")
        for value in (2, 3):
            again.send(0, 0, 0, torch.tensor([value]))
        assert int(next_of(new, ARRIVED).message) == 3
        assert next_of(again)[:2] == (JOINED, 0)


def test_what_waited_for_room_when_another_one_came() -> None:
    traffic, link, _ = make(RANK)
    inbox = Inbox()
    traffic.max_bytes = 1
    message = OutgoingMessage(msg.DATA, RANK, 0, b"answer", None, 0.0)

    def once(timeout_s: float) -> None:
        """It was lost, and the next one came, before the sender could look."""
        traffic.remove(0)
        traffic.add(0, b"\x03" * 16, 1.0)
        inbox.put(Delivery(Arrival(JOINED, 0, time_s=1.0), is_successor=True))

    loop: Any = SimpleNamespace(check=lambda: None, once=once)
    members: Any = SimpleNamespace(gone=set())
    sender = Sender(traffic._local, members, traffic, inbox, loop, 1 << 20)
    resume(traffic, link)
    sender.post(message)
    assert link.num_posted == 1
    sender.post(message)
    assert traffic.links[0].num_posted == 0
    inbox.take()
    sender.post(message)
    assert traffic.links[0].num_posted == 1
