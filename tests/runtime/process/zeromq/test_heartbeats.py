"""Beats come in time whatever else takes long, and nobody sends them for another one."""

from collections import Counter
from time import sleep
from typing import Any

import pytest
import torch
import zmq

from gradwire.runtime.process.transport import ARRIVED, LOST
from gradwire.runtime.zeromq import identities
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.connections.wire import SENT
from gradwire.runtime.zeromq.messages import Header
from runtime.process.zeromq.jobs import Job, Proxy, crash, job, next_of, wait_until
from runtime.process.zeromq.test_hostile import Peer

SERVER, SCHEDULER = 1, 2
HEARTBEAT_S = 1.0
SETTINGS = {"heartbeat_s": HEARTBEAT_S, "server_s": HEARTBEAT_S}


def beats_of(made: Job, rank: int) -> Any:
    """The socket that is for nothing else."""
    return made.nodes[rank]._wire._heartbeats[SCHEDULER].socket


def head(made: Job, kind: int, src: int) -> bytes:
    return Header(kind, made.nodes[0]._local.job, src, SCHEDULER).pack()


@pytest.mark.slow
def test_they_do_not_wait_behind_a_large_message() -> None:
    """Over a link to the scheduler that needs three times as long for it as silence may last."""
    rate = 2e6
    slow = Proxy(rate)
    try:
        with job(1, proxy=slow, close_s=10, **SETTINGS) as made:
            sent = torch.arange(int(3 * HEARTBEAT_S * rate) // 8)
            for rank in (0, SERVER):
                made.nodes[rank].send(SCHEDULER, 0, 0, sent)
            for _ in range(2):
                arrival = next_of(made.nodes[SCHEDULER], ARRIVED, LOST, seconds=60)
                assert arrival.kind == ARRIVED, arrival.message
                assert torch.equal(arrival.message, sent)
            for rank in (0, SERVER):
                assert made.nodes[rank].next(0.0) is None
    finally:
        slow.close()


@pytest.mark.slow
def test_they_go_with_the_rest_while_their_connection_is_not_there() -> None:
    with job(1, **SETTINGS) as made:
        for rank in (0, SERVER):
            with made.nodes[rank]._turns:
                beats = beats_of(made, rank)
                beats.disconnect(beats.getsockopt(zmq.LAST_ENDPOINT))
        assert made.nodes[SCHEDULER].next(3 * HEARTBEAT_S) is None


@pytest.mark.slow
def test_they_go_with_the_rest_too_while_their_connection_carries_nothing() -> None:
    with job(1, **SETTINGS) as made:
        for rank in (0, SERVER):
            wire, beats = made.nodes[rank]._wire, beats_of(made, rank)

            def send(socket: Any, *args: Any, wire: Any = wire, beats: Any = beats) -> int:
                return SENT if socket is beats else type(wire)._send(wire, socket, *args)

            with made.nodes[rank]._turns:
                wire._send = send  # type: ignore[method-assign]
        assert made.nodes[SCHEDULER].next(3 * HEARTBEAT_S) is None


def test_those_that_are_answered_go_over_their_own_connection_alone() -> None:
    with job(1, heartbeat_s=0.5) as made:
        numbers = Counter[bool]()
        worker = made.nodes[0]
        beat = worker._wire.send_heartbeat

        def count(peer: int, head: bytes, *, is_answered: bool = True) -> None:
            numbers[is_answered] += 1
            beat(peer, head, is_answered=is_answered)

        with worker._turns:
            worker._wire.send_heartbeat = count  # type: ignore[method-assign]
        wait_until(lambda: numbers[True] >= 5)


@pytest.mark.slow
def test_a_server_sends_them_while_it_reads_what_it_was() -> None:
    def read(rank: int, incarnation: float, job: str) -> dict[int, tuple[float, int, int]]:
        if incarnation > 0:
            sleep(3 * HEARTBEAT_S)
        return {}

    with job(1, **SETTINGS, server={"links": read}) as made:
        worker, scheduler = made.nodes[0], made.nodes[SCHEDULER]
        crash(made.nodes[SERVER])
        made.all.remove(made.nodes[SERVER])
        again = made.start("server", rank=SERVER, links=read)
        worker.send(SERVER, 0, 0, torch.arange(3))
        assert next_of(again, ARRIVED, LOST).kind == ARRIVED
        for node in (worker, scheduler):
            while (arrival := node.next(0.0)) is not None:
                assert arrival.kind != LOST, arrival.message


def test_their_connection_is_for_nothing_else() -> None:
    with job(1, heartbeat_s=30) as made:
        scheduler = made.nodes[SCHEDULER]

        def refused(reason: str, header: bytes, body: bytes = b"") -> None:
            before = scheduler.refused[reason]
            with made.nodes[0]._turns:
                beats_of(made, 0).send_multipart([header, body])
            wait_until(lambda: scheduler.refused[reason] == before + 1)

        refused("source", head(made, msg.HEARTBEAT, SERVER))
        for kind in (msg.DATA, msg.RESUME, msg.ACK, msg.MEMBERSHIP):
            refused("state", head(made, kind, 0))
        own = identities.heartbeat_identity(made.nodes[0]._local.identity)
        request = msg.JoinRequest(own, msg.WORKER, msg.NOBODY, 1, 1, "")
        refused("source", head(made, msg.JOIN, 0), msg.pack_body(request))
        made.nodes[0].send(SCHEDULER, 0, 0, torch.arange(3))
        assert torch.equal(next_of(scheduler, ARRIVED).message, torch.arange(3))


def test_those_of_strangers_are_refused() -> None:
    with job(1, heartbeat_s=30) as made:
        stranger = identities.heartbeat_identity(identities.make_identity())
        worker = identities.heartbeat_identity(made.nodes[0]._local.identity)
        # Servers know no connections for beats, not even those of members.
        for rank, identity in ((SCHEDULER, stranger), (SERVER, stranger), (SERVER, worker)):
            with Peer(made.nodes[rank].address, identity) as peer:
                answer = peer.answers(head(made, msg.HEARTBEAT, 0), b"")
            assert msg.unpack_header(answer[0]).kind == msg.ERROR
            assert "not joined" in msg.unpack_text(answer[1])
        assert made.nodes[SCHEDULER].refused["unknown peer"] == 1
        assert made.nodes[SERVER].refused["unknown peer"] == 2
