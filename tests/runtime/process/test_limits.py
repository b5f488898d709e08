"""What the engine leaves in the transport, and what it leaves to it."""

from itertools import count
from typing import Any

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.core.errors import PeerLost
from gradwire.core.node import Framed, Membership, Node
from gradwire.runtime.process import native_means
from gradwire.runtime.process.engine import ProcessEngine, StuckError
from gradwire.runtime.process.transport import (
    DONE,
    FINISHED,
    GOODBYE,
    LOST,
    Arrival,
    message_nbytes,
    tensor_of,
)
from runtime.process.test_engine import Within, came, transports

EARLY = torch.ones(250)  # 1,000 bytes


def test_the_bytes_of_messages() -> None:
    assert message_nbytes(EARLY) == 1000
    assert message_nbytes(Framed(Membership(0, True), EARLY)) == 1000
    assert message_nbytes(Framed(Membership(0, True))) == 0
    assert tensor_of(None) is None


def test_what_is_unread_is_limited_while_there_is_something_to_do() -> None:
    transport = transports(2)[0]
    for _ in range(50):
        transport.happen(came(1, "early", EARLY))
    transport.happen(came(1, "late", torch.zeros(1)))
    held = []

    def evaluate(requests: Any) -> list[Any]:
        held.append(engine.unread.nbytes)
        return [None] * len(requests)

    engine = ProcessEngine(transport, evaluate=evaluate, max_unread_nbytes=5_500, timeout_s=5)

    async def program(node: Node) -> float:
        for _ in range(10):
            await node.compute("gradient")
        late = await node.recv(1, "late")  # behind all others: they must be taken
        held.append(engine.unread.nbytes)
        for _ in range(50):
            await node.recv(1, "early")
        return float(late)

    transport.happen(Arrival(DONE, 1, tag=1))
    assert engine.run(program) == 0.0
    assert held == [6_000] * 10 + [50_000]
    assert engine.unread.nbytes == 0


def test_polls_take_what_is_behind_the_limit() -> None:
    transport = transports(2)[0]
    for _ in range(9):
        transport.happen(came(1, "early", EARLY))
    transport.happen(came(1, "late", torch.zeros(1)))
    engine = ProcessEngine(transport, max_unread_nbytes=1_500, timeout_s=5)

    async def program(node: Node) -> int:
        for number in count():
            if await node.recv_within("late", 0.0) is not None:
                return number
        raise AssertionError

    transport.happen(Arrival(DONE, 1, tag=1))
    assert 0 < (engine.run(program) or 0) < 10


class Native(Within):
    """Has an all-reduce, whose outcomes are made up."""

    outcome: Any = None
    also: tuple[Arrival, ...] = ()

    def native_mean(self, x: torch.Tensor) -> int | None:
        if x.dtype != torch.float32:
            return None
        for arrival in self.also:
            self.happen(arrival)
        if self.outcome is not None:
            self.happen(Arrival(FINISHED, self.rank, tag=7, message=self.outcome))
        return 7


def native() -> Native:
    transport = transports(3)[0]
    return Native(transport.rank, transport._queues)


async def mean(node: Node) -> torch.Tensor:
    return await AllReduce().group(node, "x").mean(torch.ones(6))


def engine_of(transport: Within, **settings: Any) -> ProcessEngine:
    return ProcessEngine(transport, timeout_s=0.5, native=True, **settings)


def done(transport: Within) -> None:
    for peer in (1, 2):
        transport.happen(Arrival(DONE, peer, tag=1))


def test_a_native_mean_is_counted_as_the_messages_it_stands_for() -> None:
    transport = native()
    transport.outcome, transport.also = torch.full((6,), 2.0), ()
    done(transport)
    engine = engine_of(transport)
    result = engine.run(mean)
    assert result is not None
    assert bool((result == 2).all())
    assert engine.ledger.link_bytes[0] == [0, 16, 16]
    assert engine.ledger.link_messages[0] == [0, 2, 2]


def test_where_nothing_is_native_messages_are_sent() -> None:
    for transport in (transports(3)[0], native()):

        async def program(node: Node) -> torch.Tensor:
            return await AllReduce().group(node, "x").mean(torch.ones(6, dtype=torch.float64))

        with pytest.raises(StuckError, match="waits for a message from rank 2"):
            engine_of(transport).run(program)


def test_who_is_lost_in_a_native_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_means, "_GRACE_S", 0.05)
    broken = RuntimeError("a connection broke")
    gone = Arrival(LOST, 2, message="it is gone")
    for outcome, also in ((None, gone), (broken, gone), (broken, Arrival(GOODBYE, 1, tag=3))):
        transport = native()
        transport.outcome, transport.also = outcome, (also,)
        with pytest.raises(PeerLost) as lost:
            engine_of(transport).run(mean)
        assert lost.value.rank == 2
        with pytest.raises(PeerLost):  # from the beginning
            engine_of(transport, job=1).run(mean) if also.kind == GOODBYE else _again(transport)
    transport = native()
    transport.outcome = broken
    with pytest.raises(RuntimeError, match="a connection broke") as error:
        engine_of(transport).run(mean)
    assert any("no rank is known to be lost" in note for note in error.value.__notes__)


def _again(transport: Native) -> None:
    engine = engine_of(transport, job=1)
    engine._arrive(Arrival(LOST, 2, message="it is gone"))
    engine.run(mean)


def test_who_leaves_after_its_own_part_is_not_lost() -> None:
    transport = native()
    transport.outcome, transport.also = torch.ones(6), (Arrival(GOODBYE, 1), Arrival(GOODBYE, 2))
    assert engine_of(transport).run(mean) is not None


def test_silence_in_a_native_mean() -> None:
    with pytest.raises(StuckError, match="waits for a native collective"):
        engine_of(native()).run(mean)


def test_no_order_is_recorded_of_native_means() -> None:
    with pytest.raises(ValueError, match="native=False"):
        engine_of(native(), log=object()).run(mean)
