import pytest

from gradwire.runtime.network import Network, Nics, parse_bandwidth, parse_duration, per_node


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
