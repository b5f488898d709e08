"""Numbers and breaks, without sockets."""

import random
from collections import deque

import pytest

from gradwire.runtime.zeromq.links.link import DUPLICATE, GAP, NEXT, Link, OutgoingMessage
from sampling import slow


def out(value: int, size: int = 1) -> OutgoingMessage:
    return OutgoingMessage(0, 0, 1, bytes([value % 256]) * size, None, 0.0)


class End:
    """One end of a link over a channel that breaks."""

    def __init__(self, link: Link, incarnation: float = 0.0) -> None:
        self.link, self.incarnation = link, incarnation
        self.wire: deque[tuple[int, OutgoingMessage, tuple[int, int, int]]] = deque()
        self.got: list[int] = []

    def send(self) -> None:
        while (todo := self.link.to_send) is not None:
            self.link.num_sent = todo[0]
            self.wire.append((*todo, self.link.counts(False)))

    def receive(self, other: "End") -> None:
        number, message, counts = other.wire.popleft()
        assert self.link.take_counts(*counts)
        if self.link.judge(number) == NEXT:
            taken = self.link.take(message.nbytes)
            self.got.append(message.body[0])
            self.link.hand(taken, message.nbytes, self.link.era, False)


def resume(connecting: End, binding: End) -> tuple[str | None, str | None]:
    for end in (connecting, binding):
        end.wire.clear()
        end.link.down()
    a, b = connecting.link, binding.link
    knows = a.peer_incarnation is None or a.peer_incarnation == binding.incarnation
    there = hear(b, connecting, knows)
    return hear(a, binding), there


def hear(link: Link, other: End, knows_us: bool = True) -> str | None:
    """What the other end says when it resumes."""
    acknowledged, room, taken = other.link.counts(False)
    return link.resumed(
        taken,
        other.link.num_released + 1,
        other.incarnation,
        other.link.is_fresh,
        knows_us,
        acknowledged=acknowledged,
        room=room,
    )


@pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 20))])
def test_everything_arrives_once_and_in_order_whatever_breaks(seed: int) -> None:
    rng = random.Random(seed)
    ends = End(Link(1, None, 0.0)), End(Link(0, b"a", 0.0))
    posted: tuple[list[int], list[int]] = ([], [])
    assert resume(*ends) == (None, None)
    for step in range(300):
        side = rng.randrange(2)
        action = rng.random()
        if action < 0.4:
            ends[side].link.post(out(step, rng.randrange(1, 50)))
            posted[side].append(step % 256)
            ends[side].send()
        elif action < 0.9:
            if ends[1 - side].wire:
                ends[side].receive(ends[1 - side])
        else:
            assert resume(*ends) == (None, None)
            for end in ends:
                end.send()
    for side in (0, 1):
        while ends[side].wire:
            ends[1 - side].receive(ends[side])
    assert ends[1].got == posted[0]
    assert ends[0].got == posted[1]
    for end in ends:
        assert end.link.bytes_posted == sum(one.nbytes for one in end.link.resend_queue)


def test_a_receiver_takes_only_the_next_number() -> None:
    link = Link(0, None, 0.0)
    assert [link.judge(number) for number in (0, 1, 2)] == [DUPLICATE, NEXT, GAP]
    link.take(10)
    assert [link.judge(number) for number in (1, 2, 3)] == [DUPLICATE, NEXT, GAP]


def test_what_was_not_sent_cannot_be_acknowledged() -> None:
    link = Link(0, None, 0.0)
    link.post(out(1))
    assert not link.take_counts(2, 0, 2)
    assert not link.take_counts(1, 0, 0)
    assert not link.take_counts(0, 1, 0)
    assert link.take_counts(0, 1, 1)
    assert link.bytes_posted == 0  # there is room
    assert len(link.resend_queue) == 1
    assert link.take_counts(1, 1, 1)
    assert not link.resend_queue


def test_acknowledged_when_the_caller_says_so() -> None:
    link = Link(0, None, 0.0)
    for _ in range(4):
        link.take(5)
    for number, caller_acknowledges in ((1, True), (2, False), (3, True), (4, False)):
        link.hand(number, 5, 0, caller_acknowledges)
    assert link.counts(False) == (0, 0, 4)
    assert link.counts(True) == (0, 4, 4)
    link.acknowledge(1)
    assert link.num_cleared == 2
    link.acknowledge(3)
    assert link.num_cleared == 4


def test_a_process_that_begins_again_with_what_it_knew() -> None:
    worker, server = End(Link(1, None, 0.0)), End(Link(0, b"a", 0.0))
    assert resume(worker, server) == (None, None)
    for value in range(5):
        worker.link.post(out(value))
        server.link.post(out(10 + value))
    worker.send()
    server.send()
    for _ in range(3):
        server.receive(worker)
        worker.receive(server)
    # Three were received and three sent when it wrote that down; the worker got two more.
    again = End(Link(0, b"a", 0.0, (3, 3)), incarnation=7.0)
    worker.receive(server)
    worker.receive(server)
    assert resume(worker, again) == (None, None)
    for value in (13, 14, 15):
        again.link.post(out(value))
    for end in (worker, again):
        end.send()
    while again.wire:
        worker.receive(again)
    while worker.wire:
        again.receive(worker)
    assert worker.got == [10, 11, 12, 13, 14, 15]
    assert again.got == [3, 4]


def test_a_process_that_begins_again_and_knows_nothing() -> None:
    worker, server = End(Link(1, None, 0.0)), End(Link(0, b"a", 0.0))
    resume(worker, server)
    for value in range(5):
        worker.link.post(out(value))
        server.link.post(out(10 + value))
    worker.send()
    server.send()
    for _ in range(3):
        server.receive(worker)
        worker.receive(server)
    worker.link.take_counts(*server.link.counts(False))
    again = End(Link(0, b"a", 0.0), incarnation=7.0)
    assert resume(worker, again) == (None, None)
    again.link.post(out(20))
    worker.send()
    again.send()
    worker.receive(again)
    while worker.wire:
        again.receive(worker)
    assert again.got == [3, 4]
    assert worker.got[-1] == 20


def test_what_an_earlier_process_was_told_does_not_count_for_one_that_knows_nothing() -> None:
    worker, again = End(Link(1, None, 0.0)), End(Link(0, b"a", 0.0), incarnation=7.0)
    assert resume(worker, End(Link(0, b"a", 0.0))) == (None, None)
    for _ in range(5):
        worker.link.hand(worker.link.take(1), 1, 0, False)
    for value in range(3):
        again.link.post(out(value))
    assert resume(worker, again) == (None, None)
    assert len(again.link.resend_queue) == 3
    assert again.link.bytes_posted == 3 * out(0).nbytes
    again.send()
    while again.wire:
        worker.receive(again)
    assert worker.got == [0, 1, 2]


def test_counts_that_cannot_be_count_as_little_as_they_can() -> None:
    link = Link(0, b"a", 0.0)
    for value in range(4):
        link.post(out(value))
    assert link.resumed(2, 1, 0.0, True, acknowledged=4, room=9) is None
    assert (len(link.resend_queue), link.num_sent, link.bytes_posted) == (2, 2, 2 * out(0).nbytes)
    assert link.resumed(3, 1, 0.0, True, acknowledged=4, room=0) is None
    assert (len(link.resend_queue), link.num_sent, link.bytes_posted) == (2, 3, 2 * out(0).nbytes)


def test_ends_that_do_not_fit_together() -> None:
    worker, server = End(Link(1, None, 0.0)), End(Link(0, b"a", 0.0, (0, 3)), incarnation=7.0)
    here, there = resume(worker, server)
    assert here == "it cannot send messages 1 to 3 any more"
    assert there == "messages 1 to 3 cannot be sent to it any more"
    link = Link(0, None, 0.0)
    problem = link.resumed(5, 1, 0.0, True)
    assert problem == "it has message 5, but 0 were sent"


def test_counts_that_cannot_be_are_refused() -> None:
    """What is acknowledged has room: or bytes would be given back that are not there."""
    link = Link(0, b"a", 0.0)
    for value in range(6):
        link.post(out(value))
    before = link.bytes_posted
    assert not link.take_counts(5, 0, 5)
    assert not link.take_counts(1, 3, 2)
    assert not link.take_counts(1, 1, 7)
    assert link.bytes_posted == before
    assert link.take_counts(5, 5, 5)
    assert link.take_counts(5, 6, 6)
    assert link.bytes_posted == 0
