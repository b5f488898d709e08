"""Workers that crash, come back and come late."""

from collections.abc import Sequence

import pytest
import torch

from gradwire.core.errors import DeadlockError, PeerLost
from gradwire.core.node import Framed, Membership, Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

ALPHA, BANDWIDTH = 0.25, 1000.0  # seconds, bytes per second


def make(size: int, faults: Sequence[str], num_workers: int | None = None, **more) -> VirtualEngine:
    network = Network((ALPHA,) * size, (BANDWIDTH,) * size)
    return VirtualEngine(network, num_workers, faults=faults, **more)


def message(nbytes: int, fill: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


async def nothing(node: Node) -> None:
    pass


async def sleeps(node: Node) -> float:
    await node.sleep(10.0)
    return await node.now()


async def waits_for_1(node: Node) -> tuple[str, float]:
    """What came of waiting for rank 1, and when."""
    try:
        await node.recv(1, "x")
    except PeerLost as error:
        return f"lost {error.rank}", await node.now()
    return "a message", await node.now()


# Crashes


def test_a_crash_is_noticed_after_a_heartbeat_and_ends_the_run_with_its_name() -> None:
    async def waits(node: Node) -> None:
        await node.recv(1, "x")

    engine = make(2, ["crash(1, at=2.0)"])
    with pytest.raises(PeerLost) as caught:
        engine.run([waits, sleeps])
    assert str(caught.value) == "rank 1 crashed at 2 s, which was noticed at 2.5 s"
    assert caught.value.rank == 1
    assert caught.value.__notes__ == ["in the program of rank 0 at virtual time 2.5 s"]


@pytest.mark.parametrize("heartbeat_s", [0.0, 0.125, 3.0])
def test_a_program_can_go_on_without_the_lost_one(heartbeat_s) -> None:
    async def survivor(node: Node) -> list:
        first = await waits_for_1(node)
        again = await waits_for_1(node)  # now it is known
        return [first, again, await node.members()]

    engine = make(3, ["crash(1, at=2.0)"], heartbeat_s=heartbeat_s)
    lost = ("lost 1", 2.0 + heartbeat_s)
    results = engine.run([survivor, sleeps, survivor])
    expected = [lost, lost, frozenset({0, 2})]
    assert results == [expected, None, expected]
    assert engine.alive == {0, 2}
    assert engine.clocks == [2.0 + heartbeat_s, 2.0, 2.0 + heartbeat_s]


def test_members_and_messages_go_on_until_the_crash_is_noticed() -> None:
    async def looks(node: Node) -> list[int]:
        seen = []
        for _ in range(4):
            await node.sleep(0.75)
            seen.append(len(await node.members()))
        return seen

    # At 0.75, 1.5, 2.25, 3 s; noticed at 2.5 s.
    assert make(2, ["crash(1, at=2.0)"]).run([looks, sleeps])[0] == [2, 2, 2, 1]


def test_programs_of_a_crashed_worker_are_closed_and_never_run_again() -> None:
    log: list = []

    async def guarded(node: Node, name: str, effect) -> None:
        try:
            await effect
            log.append(f"{name} went on")
        finally:
            log.append(name)

    async def child_ends(node: Node) -> None:
        await node.sleep(3.0)

    async def victim(node: Node) -> None:
        await node.spawn(guarded(node, "sleep", node.sleep(3.0)))
        await node.spawn(guarded(node, "timeout", node.recv_within("never", 3.0)))
        await node.spawn(guarded(node, "recv", node.recv(0, "late")))
        await node.spawn(guarded(node, "recv_any", node.recv_any("late too")))
        await node.spawn(guarded(node, "compute", node.compute("victim")))
        await guarded(node, "join", node.join(await node.spawn(child_ends(node))))

    async def other(node: Node) -> int:
        await node.sleep(1.0)
        await node.send(1, "late", message(1500))  # under way at 2 s
        await node.send(1, "late too", message(1))
        await node.sleep(9.0)
        return 5

    engine = make(2, ["crash(1, at=2.0)"], seconds=lambda rank, request: 3.0)
    assert engine.run([other, victim]) == [5, None]
    assert sorted(log) == ["compute", "join", "recv", "recv_any", "sleep", "timeout"]


def test_the_gradient_of_a_crashed_worker_is_not_evaluated() -> None:
    batches = []

    def evaluate(requests: list) -> list:
        batches.append(list(requests))
        return requests

    async def program(node: Node) -> int:
        return await node.compute(node.rank)

    times = (5.0, 3.0, 4.0)
    engine = make(
        3, ["crash(1, at=2.0)"], evaluate=evaluate, seconds=lambda rank, request: times[rank]
    )
    assert engine.run([program] * 3) == [0, None, 2]
    assert batches == [[0, 2]]
    assert engine.clocks == [5.0, 2.0, 4.0]


def test_a_gradient_already_evaluated_does_not_come_either() -> None:
    async def program(node: Node) -> int:
        return await node.compute(node.rank)

    engine = make(
        2,
        ["crash(1, at=2.0)"],
        evaluate=lambda requests: requests,
        seconds=lambda rank, request: 1.0 + 2.0 * rank,
    )
    assert engine.run([program] * 2) == [0, None]


@pytest.mark.parametrize("heartbeat_s", [0.0, 0.125, 0.5])
def test_what_had_left_the_nic_arrives(heartbeat_s) -> None:
    async def sender(node: Node) -> None:
        for _ in range(3):
            await node.send(0, "x", message(1000))  # leave at 1, 2 and 3 s
        await node.sleep(10.0)

    async def receiver(node: Node) -> list:
        return [await waits_for_1(node) for _ in range(3)]

    engine = make(2, ["crash(1, at=2.0)"], heartbeat_s=heartbeat_s)
    lost = max(2.0 + heartbeat_s, 2.25)  # it is known, but one message is still under way
    expected = [("a message", 1.25), ("a message", 2.25), ("lost 1", lost)]
    assert engine.run([receiver, sender])[0] == expected
    assert engine.ledger.link_messages[1][0] == 3


def test_what_was_half_sent_does_not_arrive() -> None:
    async def sender(node: Node) -> None:
        await node.send(0, "x", message(3000))  # its first bits arrive at 0.25 s
        await node.sleep(10.0)

    assert make(2, ["crash(1, at=2.0)"]).run([waits_for_1, sender])[0] == ("lost 1", 2.5)


def test_messages_wait_in_the_inbox_for_who_asks_later() -> None:
    async def sender(node: Node) -> None:
        await node.send(0, "x", message(1000))
        await node.sleep(10.0)

    async def receiver(node: Node) -> list:
        await node.sleep(5.0)
        return [await waits_for_1(node), await waits_for_1(node)]

    expected = [("a message", 5.0), ("lost 1", 5.0)]
    assert make(2, ["crash(1, at=2.0)"]).run([receiver, sender])[0] == expected


def test_behind_a_message_that_is_lost_nothing_arrives(monkeypatch) -> None:
    counts = [1]
    monkeypatch.setattr(
        "gradwire.runtime.network.links.Links._num_lost",
        lambda *link: counts.pop() if counts else 0,
    )

    async def sender(node: Node) -> None:
        await node.send(0, "x", message(1000))  # lost, would go again at 6 s
        await node.send(0, "x", message(1000))  # there at 2.25 s, but not its turn
        await node.sleep(10.0)

    engine = make(2, ["crash(1, at=4.0)", "loss(0.5, timeout=5.0)"])
    assert engine.run([waits_for_1, sender])[0] == ("lost 1", 4.5)
    assert engine.ledger.total_messages == 2


def test_messages_to_a_crashed_worker_are_counted_and_go_nowhere() -> None:
    async def sender(node: Node) -> float:
        await node.sleep(3.0)
        for _ in range(2):
            await node.send(1, "x", message(1000))
        await node.send(2, "x", message(1000))
        return await node.now()

    async def receiver(node: Node) -> float:
        await node.recv(0, "x")
        return await node.now()

    engine = make(3, ["crash(1, at=2.0)"])
    # The two before it occupy the sender's NIC.
    assert engine.run([sender, sleeps, receiver]) == [3.0, None, 5.0 + ALPHA + 1.0]
    assert engine.ledger.link_bytes[0] == [0, 2000, 1000]


def test_a_crash_comes_before_what_else_happens_at_that_time() -> None:
    async def program(node: Node) -> str:
        await node.sleep(2.0)
        return "done"

    assert make(2, ["crash(1, at=2.0)"]).run([program] * 2) == ["done", None]
    assert make(2, ["crash(1, at=0.0)"]).run([program] * 2) == ["done", None]


def test_a_deadlock_names_those_that_crashed() -> None:
    async def waits(node: Node) -> None:
        await node.recv_any("x")

    engine = make(3, ["crash(1, at=2.0)", "arrive(2, at=1e9)"])
    with pytest.raises(DeadlockError) as caught:
        engine.run([waits, sleeps, nothing], rejoin=waits)
    assert "rank 0 waits for a message from any rank, tag 'x'" in str(caught.value)
    assert "rank 1 crashed at 2 s" in str(caught.value)


def test_nobody_may_be_left() -> None:
    async def polls(node: Node) -> None:
        while True:
            await node.recv_within("x", 1.0)

    engine = make(3, ["crash(0, at=1.0)", "crash(1, at=2.0)"], num_workers=2)
    assert engine.run([sleeps] * 2, [polls]) == [None, None]
    assert engine.alive == frozenset()
    assert engine.now == 2.0


# Coming back


def test_who_comes_back_starts_a_new_program() -> None:
    log = []

    async def again(node: Node) -> tuple[str, int, float]:
        return "again", node.rank, await node.now()

    engine = make(
        2,
        ["crash(1, at=2.0, rejoin=4.0)"],
        on_crash=lambda rank, now: log.append(("crash", rank, now)),
        on_return=lambda rank, now: log.append(("return", rank, now)),
    )
    assert engine.run([sleeps, sleeps], rejoin=again) == [10.0, ("again", 1, 4.0)]
    assert log == [("crash", 1, 2.0), ("return", 1, 4.0)]
    assert engine.alive == {0, 1}
    assert engine.clocks == [10.0, 4.0]


def test_a_worker_may_crash_and_come_back_often() -> None:
    starts = []

    async def again(node: Node) -> float:
        starts.append(await node.now())
        return await sleeps(node)

    engine = make(2, [f"crash(1, at={t}.0, rejoin={t}.5)" for t in (1, 2, 3)])
    assert engine.run([sleeps, sleeps], rejoin=again) == [10.0, 13.5]
    assert starts == [1.5, 2.5, 3.5]


def test_a_return_needs_a_program() -> None:
    with pytest.raises(ValueError, match="rejoin"):
        make(2, ["crash(1, at=2.0, rejoin=4.0)"]).run([sleeps, sleeps])
    with pytest.raises(ValueError, match="rejoin"):
        make(2, ["arrive(1, at=2.0)"]).run([sleeps, sleeps])


def test_messages_from_before_the_return_stay_lost() -> None:
    async def sender(node: Node) -> None:
        await node.send(1, "x", message(10, 1))  # read by nobody before the crash
        await node.sleep(1.5)
        await node.send(1, "x", message(1000, 2))  # under way when it crashes
        await node.sleep(2.4)
        await node.send(1, "x", message(1000, 3))  # under way when it comes back
        await node.sleep(1.0)
        await node.send(1, "x", message(1000, 4))

    async def again(node: Node) -> tuple[int, float]:
        data = await node.recv(0, "x")
        return int(data[0]), await node.now()

    engine = make(2, ["crash(1, at=2.0, rejoin=4.0)"])
    fill, now = engine.run([sender, sleeps], rejoin=again)[1]
    assert fill == 4
    assert now == pytest.approx(1.5 + 2.4 + 1.0 + 1.0 + ALPHA)


def test_a_nic_that_comes_back_is_free() -> None:
    async def sender(node: Node) -> None:
        await node.send(0, "x", message(50_000))
        await node.sleep(10.0)

    async def again(node: Node) -> None:
        await node.send(0, "x", message(1000))

    async def receiver(node: Node) -> list:
        first = await waits_for_1(node)
        await node.sleep(0.5)
        return [first, await waits_for_1(node)]

    engine = make(2, ["crash(1, at=2.0, rejoin=2.25)"])
    # The first message occupied the NICs of both: what will not come is not waited for.
    expected = [("lost 1", 2.25), ("a message", 2.25 + ALPHA + 1.0)]
    assert engine.run([receiver, sender], rejoin=again)[0] == expected


def test_watchers_are_told_who_leaves_and_who_comes() -> None:
    async def watches(node: Node) -> list:
        await node.watch("who")
        seen = []
        while (told := await node.recv_within("who", 5.0)) is not None:
            assert told[0] == node.rank
            members = await node.members()
            seen.append((await node.now(), told[1], members))
        return seen

    everybody, others = frozenset({0, 1, 2}), frozenset({0, 2})
    engine = make(3, ["crash(1, at=2.0, rejoin=4.0)"])
    results = engine.run([watches, sleeps, nothing], rejoin=nothing)
    assert results[0] == [
        (2.5, Framed(Membership(1, False)), others),
        (4.0, Framed(Membership(1, True)), everybody),
    ]


def test_a_short_absence_is_noticed_with_the_return() -> None:
    async def watches(node: Node) -> list:
        await node.watch("who")
        await node.watch("who")  # once is enough
        seen = []
        while (told := await node.recv_within("who", 5.0)) is not None:
            seen.append((await node.now(), told[1].header))
        return seen

    engine = make(4, ["crash(1, at=2.0, rejoin=2.25)"], num_workers=3)
    told: list = []

    async def daemon(node: Node) -> None:
        told.extend(await watches(node))

    results = engine.run([watches, sleeps, waits_for_1], [daemon], rejoin=sleeps)
    expected = [(2.25, Membership(1, False)), (2.25, Membership(1, True))]
    assert results == [expected, 12.25, ("lost 1", 2.25)]
    assert told == expected


def test_a_crashed_worker_watches_no_longer() -> None:
    async def watches(node: Node) -> None:
        await node.watch("who")
        await node.sleep(10.0)

    async def again(node: Node) -> object:
        return await node.recv_within("who", 20.0)

    engine = make(3, ["crash(1, at=2.0, rejoin=3.0)", "crash(2, at=5.0)"])
    assert engine.run([sleeps, watches, sleeps], rejoin=again) == [10.0, None, None]


# Coming late


def test_who_arrives_later_is_no_member_before() -> None:
    async def first(node: Node) -> list:
        await node.watch("who")
        before = await node.members()
        lost = await waits_for_1(node)
        told = await node.recv_any("who")
        return [before, lost, told[1].header, await node.now(), await waits_for_1(node)]

    async def late(node: Node) -> float:
        await node.send(0, "x", message(1000))
        return await node.now()

    engine = make(2, ["arrive(1, at=3.0)"])
    never = nothing  # the ordinary program of the late one is not started
    results = engine.run([first, never], rejoin=late)
    expected = [{0}, ("lost 1", 0.0), Membership(1, True), 3.0, ("a message", 3.0 + ALPHA + 1.0)]
    assert results == [expected, 3.0]


def test_the_error_says_that_a_worker_has_not_come_yet() -> None:
    async def waits(node: Node) -> None:
        await node.recv(1, "x")

    with pytest.raises(PeerLost, match="rank 1 is not there yet"):
        make(2, ["arrive(1, at=3.0)"]).run([waits, nothing], rejoin=nothing)


# Several runs


def test_a_fault_happens_in_the_run_in_which_its_time_comes() -> None:
    engine = make(2, ["crash(1, at=15.0, rejoin=35.0)"])
    run = lambda: engine.run([sleeps] * 2, rejoin=sleeps)  # noqa: E731
    assert run() == [10.0, 10.0]
    assert run() == [20.0, None]
    assert run() == [30.0, None]
    assert run() == [40.0, 45.0]
    assert run() == [50.0, 55.0]
    assert engine.now == 55.0


def test_who_is_done_crashes_in_the_next_run() -> None:
    async def program(node: Node) -> float:
        await node.sleep(10.0 if node.rank == 0 else 2.0)
        return await node.now()

    log = []
    engine = make(
        2,
        ["crash(1, at=3.0, rejoin=5.0)"],
        on_crash=lambda rank, now: log.append(now),
        on_return=lambda rank, now: log.append(now),
    )
    assert engine.run([program] * 2, rejoin=sleeps) == [10.0, 2.0]
    assert log == []
    assert engine.run([program] * 2, rejoin=sleeps) == [20.0, 15.0]
    assert log == [3.0, 5.0]


def test_a_crash_at_the_end_of_a_run_is_noticed_in_the_next() -> None:
    async def first(node: Node) -> frozenset[int]:
        await node.sleep(2.25)
        return await node.members()

    async def second(node: Node) -> tuple:
        before = await node.members()
        return before, await waits_for_1(node)

    engine = make(2, ["crash(1, at=2.0)"])
    assert engine.run([first, sleeps]) == [{0, 1}, None]
    assert engine.run([second, sleeps]) == [({0, 1}, ("lost 1", 2.5)), None]
    assert engine.run([second, sleeps])[0] == ({0}, ("lost 1", 2.5))


def test_if_nobody_is_left_a_run_waits_for_who_comes_back() -> None:
    engine = make(2, ["crash(0, at=1.0, rejoin=5.0)", "crash(1, at=2.0)"])
    assert engine.run([sleeps] * 2, rejoin=sleeps) == [15.0, None]


def test_an_engine_goes_on_from_a_snapshot() -> None:
    faults = ["crash(1, at=15.0, rejoin=25.0)", "arrive(2, at=12.0)", "loss(0.5)"]

    async def program(node: Node) -> list[float]:
        times = []
        for _ in range(5):
            await node.send((node.rank + 1) % 2, "x", message(10))
            await node.sleep(2.0)
            await node.recv_within("x", 1.0)
            times.append(await node.now())
        return times

    engines = [make(3, faults)]
    for _ in range(2):
        engines[0].run([program] * 3, rejoin=program)
    engines.append(make(3, faults))
    engines[1].restore(engines[0].snapshot())
    results = [[e.run([program] * 3, rejoin=program) for _ in range(3)] for e in engines]
    assert results[0] == results[1]
    assert engines[0].clocks == engines[1].clocks
    assert engines[0].alive == engines[1].alive == {0, 1, 2}


def test_runs_that_lose_workers_cannot_be_replayed() -> None:
    engine = make(2, ["crash(1, at=2.0, rejoin=4.0)"], record=True)

    async def program(node: Node) -> None:
        await node.sleep(10.0)

    for _ in range(2):
        engine.run([program] * 2, rejoin=program)
        assert engine.trace is not None
        assert not engine.trace.replayable


def test_the_same_faults_give_the_same_run() -> None:
    def history() -> list:
        log: list = []

        async def program(node: Node) -> None:
            await node.watch("who")
            for step in range(30):
                for peer in await node.members():
                    await node.send(peer, "x", message(50 + 10 * node.rank, step))
                while (got := await node.recv_within("x", 0.2)) is not None:
                    log.append((await node.now(), node.rank, got[0], int(got[1][0])))
                while (got := await node.recv_within("who", 0.0)) is not None:
                    log.append((await node.now(), node.rank, got[1].header))

        faults = ["crash(1, at=2.0, rejoin=4.0)", "crash(3, at=3.0)", "arrive(0, at=1.0)"]
        engine = make(4, [*faults, "loss(0.2, timeout=0.05)"])
        engine.run([program] * 4, rejoin=program)
        return [*log, engine.clocks, engine.ledger.snapshot()]

    assert history() == history()
    assert len(history()) > 100
