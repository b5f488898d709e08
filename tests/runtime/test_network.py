import pytest

from gradwire.runtime.network.network import (
    Network,
    Nics,
    parse_bandwidth,
    parse_duration,
    per_node,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("10Gbit", 1.25e9),
        ("10gbit", 1.25e9),
        (" 10 Gbit ", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("2.5Gbit", 312.5e6),
        ("100Mbit", 12.5e6),
        ("56kbit", 7000.0),
        ("8bit", 1.0),
        ("1Tbit", 125e9),
    ],
)
def test_bandwidths_are_read_in_bits_and_kept_in_bytes(text, bytes_per_second) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_second, rel=1e-15)


BAD_BANDWIDTHS = [
    *("", "10", "Gbit", "10GB", "10GB/s", "10 G", "10Pbit", "fast", "1e3Mbit", "nanGbit"),
    *("-1Gbit", "0Gbit", "infGbit", "9" * 400 + "Gbit", "1.2.3Gbit", ".Gbit", "1Gbit,1Gbit"),
]


@pytest.mark.parametrize("text", BAD_BANDWIDTHS)
def test_other_bandwidths_are_refused_with_an_example(text) -> None:
    with pytest.raises(ValueError, match="such as 10Gbit") as caught:
        parse_bandwidth(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50us", 50e-6),
        ("50µs", 50e-6),
        ("1ms", 1e-3),
        ("0.2s", 0.2),
        (" 3 ns ", 3e-9),
        ("1e-3s", 1e-3),
        ("2E2ms", 0.2),
        ("0s", 0.0),
    ],
)
def test_durations_are_read_in_seconds(text, seconds) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    ["", "50", "us", "-1ms", "1m", "1h", "1.2.3s", ".s", "nans", "infs", "1e400s", "1ms,1ms"],
)
def test_other_durations_are_refused_with_an_example(text) -> None:
    with pytest.raises(ValueError, match="like 50us") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


def test_one_value_serves_all_nodes_and_a_list_each_its_own() -> None:
    assert per_node("1ms", 3, "latency") == ["1ms"] * 3
    assert per_node("1ms, 2ms,3ms", 3, "latency") == ["1ms", "2ms", "3ms"]
    with pytest.raises(ValueError, match="2 values for 3 nodes") as caught:
        per_node("1ms,2ms", 3, "latency")
    assert "latency" in str(caught.value)


def test_a_network_is_read_from_two_strings() -> None:
    network = Network.parse(3, "1Gbit,1Gbit,100Mbit", "50us")
    assert network.size == 3
    assert network.bandwidth == (125e6, 125e6, 12.5e6)
    assert network.latency_s == pytest.approx((50e-6,) * 3)
    assert Network.uniform(2) == Network.parse(2, "10Gbit", "50us")


def test_nics_go_on_from_a_snapshot() -> None:
    network = Network((0.5, 0.5), (100.0, 100.0))
    nics, other = Nics(network), Nics(network)
    head = nics.leave(0.0, 0, 300)
    assert head == 0.5
    assert nics.arrive(head, 0, 1, 300) == 3.5
    other.restore(nics.snapshot())
    assert other.leave(1.0, 0, 100) == nics.leave(1.0, 0, 100) == 3.5
    assert other.arrive(1.0, 0, 1, 100) == nics.arrive(1.0, 0, 1, 100) == 4.5


def test_nodes_of_other_roles_come_after_the_workers() -> None:
    assert Network.parse(2, "1Gbit", "1ms", extra=2) == Network((1e-3,) * 4, (125e6,) * 4)
    each = Network.parse(2, "1Gbit,100Mbit,2Gbit", "1ms,2ms,3ms", extra=1)
    assert each.bandwidth == (125e6, 12.5e6, 250e6)
    assert each.latency_s == pytest.approx((1e-3, 2e-3, 3e-3))


def test_other_roles_have_the_best_of_the_workers_networks_unless_told() -> None:
    network = Network.parse(3, "1Gbit,100Mbit,10Mbit", "3ms,1ms,2ms", extra=2)
    assert network.bandwidth == (125e6, 12.5e6, 1.25e6, 125e6, 125e6)
    assert network.latency_s == pytest.approx((3e-3, 1e-3, 2e-3, 1e-3, 1e-3))
    mixed = Network.parse(2, "1Gbit,100Mbit", "1ms,2ms,3ms", extra=1)  # as each was written
    assert mixed.bandwidth[2] == 125e6
    assert mixed.latency_s[2] == pytest.approx(3e-3)


def test_other_numbers_of_values_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values for 2 nodes"):
        Network.parse(2, "1Gbit,1Gbit,1Gbit", "1ms")
    with pytest.raises(ValueError, match="2 values for 3 workers and 2 other nodes") as caught:
        Network.parse(3, "1Gbit", "1ms,1ms", extra=2)
    assert "latency '1ms,1ms'" in str(caught.value)


def test_what_was_cut_off_frees_the_receivers_nic() -> None:
    nics = Nics(Network((0.5,) * 3, (100.0,) * 3))
    nics.arrive(nics.leave(0.0, 0, 1000), 0, 1, 1000)
    assert nics.ingress_free[1] == 10.5
    nics.cut_off(2.0, 0, 1, 10.5)
    assert nics.ingress_free[1] == 2.5
    assert nics.arrive(3.0, 0, 1, 100) == 4.0


def test_what_queues_behind_what_was_cut_off_stays_where_it_is() -> None:
    nics = Nics(Network((0.5,) * 3, (100.0,) * 3))
    nics.arrive(nics.leave(0.0, 0, 1000), 0, 1, 1000)
    assert nics.arrive(1.0, 2, 1, 100) == 11.5
    nics.cut_off(2.0, 0, 1, 10.5)
    assert nics.ingress_free[1] == 11.5


def test_a_nic_that_is_reset_is_free() -> None:
    nics = Nics(Network((0.5, 0.5), (100.0, 100.0)))
    nics.arrive(nics.leave(0.0, 0, 1000), 0, 1, 1000)
    nics.reset(0, 3.0)
    nics.reset(1, 3.0)
    assert nics.snapshot() == {"egress_free": [3.0, 3.0], "ingress_free": [3.0, 3.0]}
