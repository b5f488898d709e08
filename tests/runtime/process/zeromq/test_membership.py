"""Who is in the job, with a clock of our own."""

import pytest

from gradwire.core.layout import NodeLayout
from gradwire.runtime.zeromq.membership.membership_list import MembershipList
from gradwire.runtime.zeromq.messages import (
    NOBODY,
    SERVER,
    WORKER,
    JoinRequest,
)

IS_LOST, HAS_JOINED = False, True


def membership(num_workers: int = 2, num_servers: int = 1) -> MembershipList:
    layout = NodeLayout(num_workers, num_servers, 1)
    return MembershipList(layout, b"scheduler", heartbeat_s=5, server_s=60)


def request(
    name: str, role: int = WORKER, wanted: int = NOBODY, sizes: tuple = (2, 1)
) -> JoinRequest:
    return JoinRequest(name.encode(), role, wanted, *sizes, f"tcp://{name}:1")


def complete() -> MembershipList:
    made = membership()
    for one in (request("s", SERVER), request("a"), request("b")):
        assert made.request_join(one, 0.0) is None
    made.accepted.clear()
    return made


def taken(made: MembershipList) -> list[tuple[bool, int]]:
    events, made.events = made.events, []
    times = [event.time_s for event in events]
    assert times == sorted(set(times))
    return [(event.has_joined, event.rank) for event in events]


def test_ranks_in_order_of_arrival_but_those_asked_for() -> None:
    made = membership(3, 2)
    sizes = (3, 2)
    for name, role, wanted in (
        ("a", WORKER, NOBODY),
        ("b", WORKER, 0),
        ("s", SERVER, 4),
        ("c", WORKER, NOBODY),
    ):
        assert made.request_join(request(name, role, wanted, sizes), 1.0) is None
    assert not made.is_complete
    assert made.missing() == "1 of 2 servers are there"
    assert made.request_join(request("t", SERVER, NOBODY, sizes), 2.0) is None
    names = [made.identity(rank).decode() for rank in range(5)]
    assert names == ["b", "a", "c", "t", "s"]
    assert made.accepted == [0, 1, 2, 3, 4]
    acceptance = made.acceptance(1)
    assert (acceptance.rank, acceptance.incarnation) == (1, 0.0)
    assert [one.rank for one in acceptance.members] == [0, 1, 2, 3, 4, 5]
    assert taken(made) == []


def test_silence_and_who_comes_then() -> None:
    made = complete()
    for second in range(1, 12):
        made.check(second)
        for rank in (1, 2):
            made.note_message(rank, second)
    assert taken(made) == [(IS_LOST, 0)]
    assert made.is_expelled(b"a")
    assert made.request_join(request("c"), 12.0) is None
    assert taken(made) == [(HAS_JOINED, 0)]
    assert made.incarnation(0) == 12.0
    assert made.request_join(request("a"), 13.0) is not None


def test_a_scheduler_that_slept_blames_nobody() -> None:
    made = complete()
    made.check(1.0)
    made.check(30.0)
    assert taken(made) == []
    for tenth in range(301, 400):
        made.check(tenth / 10)
    assert taken(made) == [(IS_LOST, 0), (IS_LOST, 1)]


def test_one_that_waits_for_a_place() -> None:
    made = complete()
    assert made.request_join(request("c"), 1.0) is None
    assert made.rank(b"c") is None
    made.note_left(1, 2.0)  # said goodbye
    made.check(2.0)
    assert made.rank(b"c") == 1
    assert taken(made) == [(HAS_JOINED, 1)]


def test_a_candidate_that_is_silent_is_forgotten() -> None:
    made = membership()
    made.request_join(request("a"), 0.0)
    for second in range(8):
        made.check(second)
    assert made.missing() == "0 of 1 servers are there, 0 of 2 workers are there"


def test_a_rank_whose_holder_is_alive_is_refused() -> None:
    """The one that asks waits first: it may be the holder, killed and started again."""
    made = membership()
    for one in (request("s", SERVER), request("a"), request("holder")):
        assert made.request_join(one, 0.0) is None
    ask = request("second", wanted=1)
    for second in range(1, 7):
        made.note_message(1, float(second))
        assert made.request_join(ask, float(second), "10.0.0.9") is None
        assert "is process " in made.waiting_reason(b"second")
    made.note_message(1, 6.5)
    problem = made.request_join(ask, 7.0, "10.0.0.9") or ""
    names = (b"olde".hex(), b"econ".hex())  # four bytes of an identity, without its first
    for text in (*names, "worker 1", "10.0.0.9", "incarnation 0"):
        assert text in problem
    assert "another --number" in problem
    assert taken(made) == []
    assert made.rank(b"holder") == 1


def test_a_rank_whose_holder_is_silent_is_taken() -> None:
    made = complete()
    for second in range(1, 5):
        made.note_message(0, float(second))
        made.check(float(second))
        assert made.request_join(request("c", wanted=1), float(second)) is None
    assert taken(made) == []
    made.note_message(0, 5.1)
    made.check(5.1)
    assert taken(made) == [(IS_LOST, 1), (HAS_JOINED, 1)]
    assert made.rank(b"c") == 1


@pytest.mark.parametrize(("name", "role", "rank"), [("b", WORKER, 1), ("s", SERVER, 2)])
def test_a_rank_whose_holder_has_closed_its_connections_is_taken(
    name: str, role: int, rank: int
) -> None:
    made = complete()
    made.note_connection(name.encode(), is_open=False)
    made.note_connection(name.encode(), is_open=True)  # it was the network
    assert made.request_join(request("c", role, rank), 1.0) is None
    assert made.rank(b"c") is None
    made.note_connection(name.encode(), is_open=False)
    assert made.request_join(request("c", role, rank), 2.0) is None
    assert made.rank(b"c") == rank
    lost = [(IS_LOST, rank)] if role == WORKER else []
    assert taken(made) == [*lost, (HAS_JOINED, rank)]
    assert made.is_expelled(name.encode())


def test_a_rank_that_another_one_waits_for() -> None:
    made = membership()
    made.request_join(request("a", wanted=0), 0.0)
    for second in range(1, 6):
        made.request_join(request("a", wanted=0), float(second))
        assert made.request_join(request("c", wanted=0), float(second)) is None
    made.request_join(request("a", wanted=0), 6.5)
    assert "asks for the same rank" in (made.request_join(request("c", wanted=0), 7.0) or "")
    # One that was killed while it waited.
    assert made.request_join(request("d", wanted=0), 7.0) is None
    made.note_connection(b"a", is_open=False)
    made.request_join(request("s", SERVER), 7.0)
    made.request_join(request("b"), 7.0)
    assert made.rank(b"d") == 0


def test_a_scheduler_that_slept_refuses_nobody() -> None:
    made = complete()
    made.check(1.0)
    assert made.request_join(request("c", wanted=1), 1.0) is None
    made.check(30.0)
    made.note_message(0, 30.0)
    assert made.request_join(request("c", wanted=1), 30.1) is None
    for tenth in range(301, 400):
        made.check(tenth / 10)
        made.note_message(0, tenth / 10)
        assert made.request_join(request("c", wanted=1), tenth / 10) is None
    assert made.rank(b"c") == 1


def test_a_server_is_waited_for() -> None:
    made = complete()
    for second in range(1, 50):
        made.check(second)
        for rank in (0, 1):
            made.note_message(rank, second)
    assert taken(made) == []
    assert made.request_join(request("t", SERVER), 50.0) is None
    assert taken(made) == [(HAS_JOINED, 2)]
    assert made.is_expelled(b"s")


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (request("x", wanted=2), "their ranks are 0 .. 1"),
        (request("x", SERVER, 0), "their ranks are 2 .. 2"),
        (request("x", sizes=(2, 7)), "2 workers and 7 servers"),
    ],
)
def test_who_cannot_join(one: JoinRequest, text: str) -> None:
    assert text in (membership().request_join(one, 0.0) or "")


def test_strangers_cannot_fill_the_list() -> None:
    made = membership()
    problems = [made.request_join(request(f"{i}", wanted=NOBODY), 0.0) for i in range(100)]
    assert problems[-1] == "too many others wait to join"


def test_who_left_is_lost_to_those_whom_its_goodbye_has_not_reached() -> None:
    made = complete()
    made.note_left(1, 1.0)
    for second in range(1, 100):
        for rank in (0, 2):
            made.note_message(rank, second)
        made.check(second)
        if second == 61:
            assert taken(made) == []
        elif second == 62:
            assert taken(made) == [(IS_LOST, 1)]
    assert taken(made) == []  # once
    assert made.acceptance(0).members[1].has_left


def test_who_has_closed_its_connections_is_lost_if_that_is_asked_for() -> None:
    for closed_s, expected in ((None, []), (1.0, [(IS_LOST, 0)])):
        layout = NodeLayout(2, 1, 1)
        made = MembershipList(layout, b"scheduler", heartbeat_s=5, server_s=60, closed_s=closed_s)
        for one in (request("s", SERVER), request("a"), request("b")):
            assert made.request_join(one, 0.0) is None
        made.check(1.0)
        made.note_connection(b"a", False)
        made.note_connection(b"b", False)
        made.check(2.0)
        made.note_connection(b"b", True)  # it was a short break
        made.check(2.9)
        assert not taken(made)
        made.check(3.1)
        assert taken(made) == expected
