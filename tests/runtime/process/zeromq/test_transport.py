"""Messages, members and breaks, all nodes in one process."""

import socket
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from math import inf

import pytest
import torch

from gradwire.core.node import Framed
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import ARRIVED, DONE, GOODBYE, JOINED, LOST, WOKEN
from gradwire.runtime.zeromq import JoinError, NoMemberError, ZmqTransport
from runtime.process.zeromq.jobs import ANY, Job, Proxy, crash, job, next_of, wait_until

SERVER, SCHEDULER = 2, 3  # of a job with two workers and a server


def number(value: int, size: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.int64)


def received(node: ZmqTransport, count: int, src: int | None = None) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        arrival = next_of(node, ARRIVED)
        if src is None or arrival.src == src:
            found.append(int(arrival.message[0]))
    return found


def test_messages_of_every_size_between_all_nodes() -> None:
    with job(2) as made:
        nodes = made.nodes
        assert sorted(nodes) == [0, 1, SERVER, SCHEDULER]
        assert all(node.rank == rank and node.size == 4 for rank, node in nodes.items())
        for size in (0, 1, 1000, 10_000, 1_000_000):
            sent = torch.arange(size, dtype=torch.float32).reshape(-1, 1)
            for src in nodes:
                for dst in nodes:
                    nodes[src].send(dst, 7, 1000 * src + size, sent)
            for dst in nodes:
                found = [next_of(nodes[dst], ARRIVED) for _ in nodes]
                assert {one.src for one in found} == set(nodes)
                for one in found:
                    assert (one.job, one.tag) == (7, 1000 * one.src + size)
                    assert torch.equal(one.message, sent)
        nodes[0].send_done(1, 7, 5)
        assert next_of(nodes[1])[:4] == (DONE, 0, 7, 5)
        assert all(not node.refused and not node.num_sent_again for node in nodes.values())


def test_what_arrives_lies_in_memory_that_can_be_used() -> None:
    with job(1) as made:
        for dtype in (torch.float64, torch.int8, torch.bfloat16, torch.bool):
            sent = torch.arange(300_000).to(dtype)
            made.nodes[0].send(1, 0, 0, sent)
            message = next_of(made.nodes[1]).message
            assert torch.equal(message, sent)
            assert message.data_ptr() % message.element_size() == 0
            message += message  # it is nobody else's


def test_headers_travel_and_bytes_are_counted() -> None:
    @dataclass(frozen=True)
    class Mark:
        local: int

    with job(1, headers=Headers(Mark)) as made:
        worker, server = made.nodes[0], made.nodes[1]
        before = worker.num_bytes_sent
        worker.send(1, 0, 0, Framed(Mark(3), torch.zeros(250_000)))
        arrival = next_of(server)
        assert arrival.message.header == Mark(3)
        assert arrival.number == 1
        wait_until(lambda: 0 <= worker.num_bytes_sent - before - 1_000_000 < 1000)


def test_a_rank_can_be_asked_for_and_only_once() -> None:
    made = Job(2, 1, join_s=5)
    ranks: list[int] = []
    bound = threading.Event()

    def on_bound(address: str) -> None:
        made.reached_at = address
        bound.set()

    def start(role: str, **settings: object) -> None:
        ranks.append(made.start(role, **settings).rank)

    threads = [
        threading.Thread(
            target=start, args=("scheduler",), kwargs={"scheduler": ANY, "on_bound": on_bound}
        )
    ]
    threads[0].start()
    bound.wait(5)
    try:
        threads.append(threading.Thread(target=start, args=("worker",), kwargs={"rank": 1}))
        threads[-1].start()
        for wanted, role in ((7, "worker"), (0, "server")):
            with pytest.raises(JoinError, match=rf"asks for rank {wanted}; their ranks are"):
                made.start(role, rank=wanted)
        with pytest.raises(JoinError, match="job with 3 workers"):
            Job(3, 1).start("worker", scheduler=made.reached_at)
        with pytest.raises(JoinError, match="another job"):
            made.start("worker", fingerprint=b"other")
        for role in ("worker", "server"):
            threads.append(threading.Thread(target=start, args=(role,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert sorted(ranks) == [0, 1, 2, 3]
    finally:
        made.close()


@pytest.mark.slow
def test_who_is_missing_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    made = Job(2, 1)
    made.reached_at = address
    with pytest.raises(JoinError, match=r"could not join at the scheduler: it does not answer"):
        made.start("worker", join_s=0.2)
    texts: list[str] = []

    def start(role: str, join_s: float) -> None:
        try:
            made.start(role, join_s=join_s)
        except JoinError as error:
            texts.append(str(error))

    # A worker that has given up does not count any more.
    limits = (("scheduler", 1.5), ("worker", 2.5))
    threads = [threading.Thread(target=start, args=limit) for limit in limits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 2
    for text in texts:
        assert "0 of 1 servers are there, 1 of 2 workers are there" in text


def test_other_machines_need_keys() -> None:
    with pytest.raises(ValueError, match=r"gradwire ps keys FILE"):
        Job(1, 1).start("scheduler", scheduler="tcp://0.0.0.0:0")
    with pytest.raises(ValueError, match=r"gradwire ps keys FILE"):
        Job(1, 1).start("server", scheduler="tcp://127.0.0.1:1", bind="tcp://0.0.0.0:0")
    with pytest.raises(ValueError, match="expected tcp://HOST:PORT"):
        Job(1, 1).start("worker", scheduler="localhost")
    with pytest.raises(JoinError, match="not complete"):
        Job(1, 1, join_s=0.1).start("scheduler", scheduler="tcp://0.0.0.0:0", insecure=True)


def test_goodbye_comes_after_everything_else_and_the_port_is_free() -> None:
    with job(2) as made:
        worker, other = made.nodes[0], made.nodes[1]
        for value in range(50):
            for dst in (1, SERVER, SCHEDULER):
                worker.send(dst, 0, 0, number(value, 20_000))
        closer = threading.Thread(target=worker.close, kwargs={"lost": 1})
        closer.start()
        for dst in (1, SERVER, SCHEDULER):
            assert received(made.nodes[dst], 50) == list(range(50))
            assert next_of(made.nodes[dst])[:4] == (GOODBYE, 0, 0, 2)
            assert made.nodes[dst].deferred(3)[0].kind == GOODBYE
        closer.join()
        other.send(0, 0, 0, number(1))  # nobody is there
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < 1.5
        for node in (SERVER, SCHEDULER):
            port = int(made.nodes[node].address.rpartition(":")[2])
            with closing(socket.socket()) as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                again.bind(("127.0.0.1", port))
        assert all(not node.refused for node in made.nodes.values())


def test_a_sender_waits_when_too_much_is_posted() -> None:
    with job(1, max_bytes_posted=1 << 20) as made:
        worker, server = made.nodes[0], made.nodes[1]
        sent = 0

        def send() -> None:
            nonlocal sent
            for value in range(100):
                worker.send(1, 0, 0, number(value, 20_000))  # 160 KB
                sent += 1

        sender = threading.Thread(target=send)
        sender.start()
        time.sleep(0.3)
        assert 5 <= sent <= 7
        assert received(server, 100) == list(range(100))
        sender.join()
        worker.send(1, 0, 0, number(1, 1_000_000))  # larger than the limit: it goes alone
        assert received(server, 1) == [1]


def test_two_that_send_to_each_other_do_not_wait_forever() -> None:
    with job(1, max_bytes_posted=1 << 20) as made:
        nodes = made.nodes[0], made.nodes[1]

        def exchange(node: ZmqTransport, other: int) -> None:
            for value in range(40):
                node.send(other, 0, 0, number(value, 20_000))
            assert received(node, 40) == list(range(40))

        threads = [threading.Thread(target=exchange, args=(nodes[i], 1 - i)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
            assert not thread.is_alive()


def test_heartbeats_go_on_while_the_caller_computes() -> None:
    with job(1, heartbeat_s=0.8) as made:
        made.nodes[0].send(1, 0, 0, number(5, 100_000))  # granted although nobody reads
        time.sleep(1.6)
        assert made.nodes[0]._traffic.links[1].num_taken_there == 1
        assert made.nodes[2].next(0.0) is None
        assert received(made.nodes[1], 1) == [5]


def test_a_lost_worker_and_who_takes_its_place() -> None:
    with job(2, heartbeat_s=1.5) as made:
        made.nodes[0].send(SERVER, 0, 0, number(1))
        assert received(made.nodes[SERVER], 1) == [1]
        crash(made.nodes[0])
        others = [made.nodes[rank] for rank in (1, SERVER, SCHEDULER)]
        for node in others:
            lost = next_of(node)
            assert lost[:2] == (LOST, 0)
            assert "nothing was received from it for 1.5 s" in lost.message
            assert 0 < lost.time_s < 5
            node.send(0, 0, 0, number(9))  # to nobody
            assert node.deferred(0)[0].kind == LOST
        again = made.start("worker")
        assert again.rank == 0
        assert again.incarnation > lost.time_s
        for node in others:
            assert next_of(node)[:2] == (JOINED, 0)
            assert node.deferred(0) == []
            node.send(0, 0, 0, number(node.rank))
        assert sorted(received(again, 3)) == [1, 2, 3]
        again.send(SERVER, 0, 0, number(4))
        arrival = next_of(made.nodes[SERVER])
        assert (arrival.src, arrival.number) == (0, 1)  # its numbers begin anew


def test_a_worker_that_asks_for_the_rank_of_a_healthy_one_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both are named, on both sides. Nobody else notices."""
    with job(2, heartbeat_s=1.0) as made:
        holder, waits = made.nodes[1], []
        named = rf"worker 1 is process {holder._local.identity.hex()[2:10]} at 127.0.0.1 .* process"
        with pytest.raises(JoinError, match=named + r" [0-9a-f]{8} at 127.0.0.1 asks") as refused:
            made.start("worker", rank=1, on_wait=waits.append)
        assert any("waits until that one has been silent for 1 s" in text for text in waits)
        said = str(refused.value).partition(": ")[2]
        assert any(said in record.getMessage() for record in caplog.records)
        holder.send(SERVER, 0, 0, number(3))
        assert received(made.nodes[SERVER], 1) == [3]
        assert all(node.next(0.0) is None for node in made.nodes.values())


def test_a_worker_that_was_killed_and_is_started_again_at_once() -> None:
    """Its connections are closed, so the new one need not wait (it may, for as long as silence
    lasts, where the last message of the old one was read too late)."""
    with job(2) as made:
        old = made.nodes[1]
        crash(old)
        made.all.remove(old)
        new = made.start("worker", rank=1)
        for node in (made.nodes[0], made.nodes[SERVER], made.nodes[SCHEDULER]):
            lost, joined = next_of(node), next_of(node)
            assert (lost[:2], joined[:2]) == ((LOST, 1), (JOINED, 1))
            assert 0 < lost.time_s < joined.time_s == new.incarnation


@pytest.mark.slow
def test_a_worker_in_the_place_of_one_that_hangs() -> None:
    """Its connections stay open, so the new one waits for as long as silence lasts."""
    with job(2, heartbeat_s=1.5) as made:
        old = made.nodes[1]
        with old._turns:  # nobody serves its sockets meanwhile
            new = made.start("worker", rank=1)
        for node in (made.nodes[0], made.nodes[SERVER], made.nodes[SCHEDULER]):
            lost, joined = next_of(node), next_of(node)
            assert (lost[:2], joined[:2]) == ((LOST, 1), (JOINED, 1))
            assert 0 < lost.time_s < joined.time_s == new.incarnation
        with pytest.raises(NoMemberError, match="start it again"):
            next_of(old)
        with pytest.raises(NoMemberError, match="rank 1 is not in the job"):
            old.send(SERVER, 0, 0, number(1))


@pytest.mark.slow
def test_who_comes_late_is_told_who_is_not_there() -> None:
    with job(3, heartbeat_s=1.5) as made:
        made.nodes[1].close()
        crash(made.nodes[2])
        assert next_of(made.nodes[4], LOST).src == 2
        new = made.start("worker", rank=1)
        assert next_of(new, LOST).src == 2
        newer = made.start("worker")  # the lowest that is lost
        assert newer.rank == 2
        assert next_of(newer, JOINED)[:2] == (JOINED, 1)


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_connections_break() -> None:
    near, far = Proxy(), Proxy()
    made = Job(1, 1)
    try:
        address: list[str] = []
        made.reached_at = far.address

        def on_bound(bound: str) -> None:
            address.append(bound)

        server = {"on_bound": lambda bound: near.to(bound), "advertise": near.address}
        starter = threading.Thread(target=made.start_all, kwargs={"server": server})
        starter.start()
        wait_until(lambda: made.scheduler_address)
        far.to(made.scheduler_address)
        starter.join()
        worker, there, scheduler = (made.nodes[rank] for rank in range(3))
        count, is_over = 400, threading.Event()

        def cut() -> None:
            while not is_over.is_set():
                time.sleep(0.05)
                near.cut()
                far.cut()

        def send(node: ZmqTransport, *peers: int) -> None:
            for value in range(count):
                for peer in peers:
                    node.send(peer, 0, 0, number(value, 20_000 if value % 7 == 0 else 1))
                time.sleep(0.001)
            for peer in peers:
                assert received(node, count, peer) == list(range(count))

        # In two rounds, so that `received` need not sort two senders.
        cutter = threading.Thread(target=cut)
        cutter.start()
        for pair in (((worker, 1), (there, 0)), ((there, 2), (scheduler, 1))):
            threads = [threading.Thread(target=send, args=one) for one in pair]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
        is_over.set()
        cutter.join()
        assert worker.num_sent_again + there.num_sent_again > 0
        assert all(node.next(0.05) is None for node in (worker, there, scheduler))
    finally:
        made.close()
        near.close()
        far.close()


def test_a_durable_server_comes_back_and_has_all_that_was_not_acknowledged() -> None:
    with job(2, server={"acknowledges": "asked"}) as made:
        server, workers = made.nodes[SERVER], (made.nodes[0], made.nodes[1])
        for value in range(10):
            for worker in workers:
                worker.send(SERVER, 0, 0, number(value, 10_000))
        for value in range(4):
            server.send(0, 0, 0, number(value))
        got = [next_of(server) for _ in range(20)]
        assert sorted((one.src, one.number) for one in got) == [
            (src, number) for src in (0, 1) for number in range(1, 11)
        ]
        assert received(workers[0], 4) == [0, 1, 2, 3]
        server.acknowledge(0, 6)
        state = server.links()
        assert state[0] == (0.0, 6, 4)
        assert state[1] == (0.0, 0, 0)
        wait_until(lambda: workers[0]._traffic.links[SERVER].num_released == 6)
        assert workers[1]._traffic.links[SERVER].num_released == 0
        server.send(0, 0, 0, number(4))  # after the state was written down
        assert received(workers[0], 1) == [4]
        crash(server)
        workers[0].send(SERVER, 0, 0, number(10))  # waits for it

        again = made.start("server", rank=SERVER, links=state, acknowledges="asked")
        assert again.incarnation > 0
        again.send(0, 0, 0, number(4))  # again: the worker has it
        again.send(0, 0, 0, number(5))
        got = [next_of(again, ARRIVED) for _ in range(15)]
        of_0 = [(one.number, int(one.message[0])) for one in got if one.src == 0]
        of_1 = [(one.number, int(one.message[0])) for one in got if one.src == 1]
        assert of_0 == [(n, n - 1) for n in range(7, 12)]
        assert of_1 == [(n, n - 1) for n in range(1, 11)]
        assert received(workers[0], 1) == [5]
        assert all(node.next(0.05) is None for node in (*workers, made.nodes[SCHEDULER]))


def test_a_server_that_forgot_everything_begins_with_what_it_did_not_acknowledge() -> None:
    with job(1) as made:
        worker, server = made.nodes[0], made.nodes[1]
        for value in range(5):
            worker.send(1, 0, 0, number(value))
            server.send(0, 0, 0, number(value))
        assert received(server, 3) == [0, 1, 2]
        assert received(worker, 5) == [0, 1, 2, 3, 4]
        wait_until(lambda: worker._traffic.links[1].num_released == 3)
        crash(server)
        again = made.start("server", rank=1)
        assert received(again, 2) == [3, 4]
        again.send(0, 0, 0, number(7))
        assert received(worker, 1) == [7]
        made.nodes[2].send(1, 0, 0, number(8))
        assert received(again, 1) == [8]


def test_a_server_that_had_not_read_anything_says_again_what_it_has_said() -> None:
    """Nothing is on disk then, but it has no other beginning."""
    with job(1, server={"acknowledges": "asked", "links": {}}) as made:
        worker, server, scheduler = (made.nodes[rank] for rank in range(3))
        for peer in (0, 2):
            server.send(peer, 0, 0, number(1))
        worker.send(1, 0, 0, number(5))
        assert received(worker, 1) == received(scheduler, 1) == [1]
        crash(server)
        again = made.start("server", rank=1, links={}, acknowledges="asked")
        for value in (1, 2):
            for peer in (0, 2):
                again.send(peer, 0, 0, number(value))
        assert received(worker, 1) == received(scheduler, 1) == [2]
        assert received(again, 1) == [5]
        assert worker.next(0.05) is None
        assert scheduler.next(0.05) is None


@pytest.mark.slow
def test_a_server_that_cannot_send_again_what_it_had_sent_is_lost() -> None:
    with job(1) as made:
        worker, server = made.nodes[0], made.nodes[1]
        state = server.links()
        crash(server)
        made.start("server", rank=1, links={**state, 0: (0.0, 0, 3)})
        lost = next_of(worker, LOST)
        assert lost.src == 1
        assert "it cannot send messages 1 to 3 any more" in lost.message


def test_a_server_begins_again_with_what_was_on_its_way() -> None:
    with job(1) as made:
        worker, server = made.nodes[0], made.nodes[1]
        server.send(0, 0, 0, number(1))
        assert received(worker, 1) == [1]
        wait_until(lambda: not server._traffic.links[0].resend_queue)
        with worker._turns:  # it takes in nothing
            for value in (2, 3):
                server.send(0, 0, 0, number(value, 50_000))
            state, outstanding = server.links(), server.outstanding()
            crash(server)
        assert (state[0], outstanding[0]) == ((0.0, 0, 3), 2)
        again = made.start("server", rank=1, links={**state, 0: (0.0, 0, 1)})
        for value in (2, 3, 4):
            again.send(0, 0, 0, number(value))
        assert received(worker, 3) == [2, 3, 4]


@pytest.mark.slow
def test_a_server_that_does_not_come_back_is_lost_after_a_while() -> None:
    with job(1, heartbeat_s=2, server_s=3, max_bytes_posted=1000) as made:
        worker, server = made.nodes[0], made.nodes[1]
        crash(server)
        began = time.monotonic()
        worker.send(1, 0, 0, number(1, 200))
        worker.send(1, 0, 0, number(1, 200))  # waits until the server is lost
        assert time.monotonic() - began > 2
        lost = next_of(worker, LOST)
        assert lost.src == 1
        assert "nothing was received from it for 3 s" in lost.message
        assert next_of(made.nodes[2], LOST).src == 1


def test_a_send_that_waits_for_room_ends_when_the_scheduler_is_lost() -> None:
    """Without the scheduler nobody reports that the server is lost."""
    with job(1, heartbeat_s=2, server_s=0.8, max_bytes_posted=1000) as made:
        worker = made.nodes[0]
        crash(made.nodes[2])
        crash(made.nodes[1])
        worker.send(1, 0, 0, number(1, 200))
        worker.send(1, 0, 0, number(1, 200))
        assert next_of(worker, LOST).src == 2


def test_without_the_scheduler_nobody_goes_on() -> None:
    with job(1, heartbeat_s=2, server_s=0.9) as made:
        crash(made.nodes[2])
        for rank in (0, 1):
            lost = next_of(made.nodes[rank])
            assert lost[:2] == (LOST, 2)
            assert "nothing was received from the scheduler for 0.9 s" in lost.message


@pytest.mark.slow
def test_members_are_told_before_the_scheduler_says_so() -> None:
    with job(1, heartbeat_s=1.5) as made:
        crash(made.nodes[0])
        assert next_of(made.nodes[2]).kind == LOST
        made.nodes[2].send(1, 0, 0, number(1))
        assert [next_of(made.nodes[1]).kind for _ in range(2)] == [LOST, ARRIVED]


def test_large_answers_go_few_at_a_time() -> None:
    with job(3, server={"max_large": 1}) as made:
        server = made.nodes[3]
        granted: list[int] = []
        grant = server._traffic._outgoing.grant

        def count(*args: object) -> object:
            granted.append(len(server._traffic._outgoing._granted))
            return grant(*args)  # type: ignore[arg-type]

        server._traffic._outgoing.grant = count  # type: ignore[method-assign,assignment]
        for _ in range(5):
            for rank in range(3):
                server.send(rank, 0, 0, number(rank, 300_000))
        for rank in range(3):
            assert received(made.nodes[rank], 5) == [rank] * 5
        assert max(granted) == 1


@dataclass(frozen=True)
class Layer:
    priority: int


def test_the_most_urgent_of_the_large_messages_come_first() -> None:
    with job(4, headers=Headers(Layer)) as made:
        server = made.nodes[4]
        grants = server._traffic._incoming
        grants._granted[99] = (1, inf)  # another one has its turn
        for rank, (priority, size) in enumerate(((2, 30_000), (1, 90_000), (1, 60_000), (9, 1))):
            made.nodes[rank].send(4, 0, 0, Framed(Layer(priority), number(rank, size)))
        assert next_of(server, ARRIVED).src == 3  # it is small, and waits for nobody
        wait_until(lambda: len(grants._requests) == 3)
        with server._turns:
            grants.forget(99)
            server._traffic.tick()
        assert [next_of(server, ARRIVED).src for _ in range(3)] == [2, 1, 0]


def test_what_nobody_reads_does_not_pile_up() -> None:
    with job(1, max_bytes_posted=1 << 20) as made:
        worker, server = made.nodes[0], made.nodes[1]
        worker._traffic.max_bytes = 1 << 30  # a worker that does not keep to the limit
        for value in range(100):
            worker.send(1, 0, 0, number(value, 20_000))
        time.sleep(0.3)
        link = server._traffic.links[0]
        assert link.unread_bytes <= 3 << 20
        assert received(server, 100) == list(range(100))


def test_another_thread_wakes_a_node_that_waits() -> None:
    with job(1, 1) as made:
        worker = made.nodes[0]
        threading.Timer(0.05, worker.wake).start()
        arrival = worker.next(10.0)
        assert arrival is not None
        assert arrival.kind == WOKEN
        worker.wake()  # while nobody waits
        worker.wake()
        arrival = worker.next(10.0)
        assert arrival is not None
        assert arrival.kind == WOKEN
        assert worker.next(0.0) is None
