"""Few at a time, in order of priority, size and arrival."""

from gradwire.runtime.zeromq.links import grants as grants_module
from gradwire.runtime.zeromq.links.grants import Grants


def test_in_order_of_priority_then_size_then_arrival() -> None:
    grants = Grants(1)
    for peer, nbytes, priority in ((0, 50, 1), (1, 90, 0), (2, 50, 1), (3, 40, 1), (4, 99, -1.5)):
        grants.ask(peer, 7, nbytes, priority)
    order = []
    while (granted := grants.grant()) is not None:
        assert grants.grant() is None  # one at a time
        order.append(granted[0])
        assert grants.holds(*granted)
        assert grants.arrived(*granted)
    assert order == [4, 1, 3, 0, 2]


def test_few_at_a_time_and_one_of_each() -> None:
    grants = Grants(2)
    for peer in range(3):
        grants.ask(peer, 1, 10, 0)
    assert [grants.grant(), grants.grant(), grants.grant()] == [(0, 1), (1, 1), None]
    grants.ask(0, 2, 10, 0)
    assert not grants.arrived(1, 0)  # an earlier one
    assert grants.arrived(1, 1)
    assert grants.grant() == (2, 1)
    assert grants.arrived(2, 5)
    assert grants.grant() is None  # the one granted to 0 has not come
    assert grants.arrived(0, 1)
    assert grants.grant() == (0, 2)


def test_who_may_not_waits_and_holds_nobody_up() -> None:
    grants = Grants(1)
    grants.ask(0, 1, 10, 0)
    grants.ask(1, 1, 10, 0)
    assert grants.grant(lambda peer: peer == 1) == (1, 1)
    grants.forget(1)
    assert grants.grant(lambda peer: peer == 1) is None
    assert grants.grant() == (0, 1)


def test_asking_again_changes_nothing() -> None:
    grants = Grants(1)
    grants.ask(0, 1, 10, 0)
    grants.ask(1, 1, 10, 0)
    grants.ask(0, 1, 10, 0)
    assert grants.grant() == (0, 1)


def test_one_that_takes_too_long_holds_nobody_up(monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr(grants_module, "monotonic", lambda: now)
    grants = Grants(1, patience_s=5.0)
    for peer in range(3):
        grants.ask(peer, 1, 10, 0)
    assert grants.grant() == (0, 1)
    now = 4.9
    assert grants.grant() is None
    now = 5.0
    assert grants.grant() == (1, 1)
    assert grants.grant() is None
    assert grants.holds(0, 1)  # it may still come
    assert grants.arrived(0, 1)
    assert grants.arrived(1, 1)
    assert grants.grant() == (2, 1)
