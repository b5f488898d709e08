"""Networks with a shape: times of messages and collectives against closed forms."""

import random

import pytest
import torch

import gradwire
from gradwire.architecture import ARCHITECTURE
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.runtime.network.flows import Flow, Flows
from gradwire.runtime.network.network import Network
from gradwire.runtime.network.topology import TOPOLOGY
from gradwire.runtime.virtual.engine import VirtualEngine

LATENCY, HOP = 1e-3, 1e-2  # of a NIC, of an uplink
FAST, SLOW = "8Mbit", "800kbit"  # 1e6 and 1e5 bytes per second
NBYTES = 240_000


def shaped(size: int, topology: str, bandwidth: str = FAST) -> Network:
    network = Network.parse(size, bandwidth, "1ms")
    return TOPOLOGY.parse(topology).shape(network, size)


def arrivals(
    network: Network, sends: dict[int, list[tuple[int, int]]], **settings: object
) -> dict[tuple[int, int], float]:
    """When each message arrives: `sends` has receivers and sizes by sender."""
    engine = VirtualEngine(network, **settings)  # type: ignore[arg-type]
    times = {}

    async def program(node: Node) -> None:
        for dst, nbytes in sends.get(node.rank, []):
            await node.send(dst, "x", torch.zeros(nbytes, dtype=torch.uint8))
        expected = [src for src, own in sends.items() for dst, _ in own if dst == node.rank]
        for _ in expected:
            src, _ = await node.recv_any("x")
            times[src, node.rank] = await node.now()

    engine.run([program] * network.size)
    return times


def all_reduce_s(network: Network, architecture: str, nbytes: int) -> float:
    engine = VirtualEngine(network)
    x = torch.ones(nbytes // 4)

    async def program(node: Node) -> None:
        mean = await ARCHITECTURE.parse(architecture).group(node, "x").mean(x)
        assert torch.equal(mean, x)

    engine.run([program] * network.size)
    return engine.now


RACKS = f'racks(2, uplink="{SLOW}", latency="10ms")'


def test_one_message_takes_its_latencies_and_the_slowest_link():
    network = shaped(4, RACKS)
    assert arrivals(network, {0: [(1, 1000)]}) == {(0, 1): pytest.approx(LATENCY + 1e-3)}
    assert arrivals(network, {0: [(2, 1000)]}) == {(0, 2): pytest.approx(LATENCY + HOP + 1e-2)}


def test_an_uplink_is_shared_fairly():
    # Three flows of 1000, 1000 and 4000 bytes share 1e5 B/s: thirds until the short ones end.
    times = arrivals(shaped(6, RACKS), {0: [(3, 1000)], 1: [(4, 1000)], 2: [(5, 4000)]})
    short = 3000 / 1e5
    assert times[0, 3] == times[1, 4] == pytest.approx(LATENCY + HOP + short)
    assert times[2, 5] == pytest.approx(LATENCY + HOP + 6000 / 1e5)


def test_what_a_flow_cannot_use_goes_to_the_others():
    # 0 -> 2 crosses the slow uplink; 0 -> 1 gets the rest of the NIC of 0.
    times = arrivals(shaped(4, RACKS), {0: [(2, 10_000), (1, 90_000)]})
    assert times[0, 2] == pytest.approx(LATENCY + HOP + 0.1)
    assert times[0, 1] == pytest.approx(LATENCY + 0.1)


def test_incast_on_an_uplink():
    # All of one rack send to one node of the other: the uplink carries everything.
    sends = {rank: [(4, 5000)] for rank in range(4)}
    times = arrivals(shaped(8, RACKS), sends)
    assert all(time == pytest.approx(LATENCY + HOP + 0.2) for time in times.values())


def test_messages_between_two_nodes_follow_one_another():
    network = shaped(2, f'racks(2, uplink="{SLOW}", latency="10ms")')
    engine = VirtualEngine(network)
    times: list[float] = []

    async def program(node: Node) -> None:
        for number in range(3):
            if node.rank == 0:
                await node.send(1, "x", torch.full((1000,), number, dtype=torch.uint8))
            else:
                assert int((await node.recv(0, "x"))[0]) == number
                times.append(await node.now())

    engine.run([program] * 2)
    assert times == [pytest.approx(LATENCY + HOP + 0.01 * (1 + n)) for n in range(3)]


@pytest.mark.parametrize("size", [4, 6, 8])
def test_ring_all_reduce_on_two_racks(size):
    """Both slow links carry 2(n-1) pieces, one after the other without a pause."""
    expected = 2 * (size - 1) * NBYTES / size / 1e5 + LATENCY + HOP
    assert all_reduce_s(shaped(size, RACKS), "ring", NBYTES) == pytest.approx(expected, rel=1e-6)


def test_hierarchical_all_reduce_on_two_racks():
    """Trees of 4 within racks, a ring of 2 leaders between them.

    On the way down a leader sends to both children at once, so both have half of its bandwidth.
    """
    near, far = LATENCY + NBYTES / 1e6, LATENCY + HOP + NBYTES / 2 / 1e5
    seconds = all_reduce_s(shaped(8, RACKS), "hierarchical(2)", NBYTES)
    down = (LATENCY + 2 * NBYTES / 1e6) + near
    assert seconds == pytest.approx(2 * near + 2 * far + down, rel=1e-6)
    assert seconds < all_reduce_s(shaped(8, RACKS), "ring", NBYTES)


def test_without_contention_a_fabric_takes_the_times_of_a_switch():
    """A ring never has two messages on one NIC at once."""
    wide = shaped(4, 'racks(2, uplink="1Gbit", latency="0s")')
    switch = shaped(4, "switch")
    assert switch.fabric is None
    expected = all_reduce_s(switch, "ring", NBYTES)
    assert all_reduce_s(wide, "ring", NBYTES) == pytest.approx(expected, rel=1e-9)


def write(path, text: str) -> str:
    path.write_text(text)
    return f'file("{path}")'


LINE = """
[[link]]
between = [0, "a"]
bandwidth = "8Mbit"
latency = "1ms"
[[link]]
between = ["a", "b"]
bandwidth = "800kbit"
latency = "2ms"
[[link]]
between = ["b", 1]
bandwidth = "8Mbit"
"""


def test_links_from_a_file(tmp_path):
    network = shaped(2, write(tmp_path / "links.toml", LINE))
    assert arrivals(network, {0: [(1, 1000)]}) == {(0, 1): pytest.approx(3e-3 + 1e-2)}


def test_background_traffic_takes_its_share(tmp_path):
    background = '[[background]]\nfrom = 0\nto = 1\nbandwidth = "{}"\n'
    little = write(tmp_path / "little.toml", LINE + background.format("200kbit"))
    assert arrivals(shaped(2, little), {0: [(1, 1000)]}) == {
        (0, 1): pytest.approx(3e-3 + 1000 / 7.5e4)
    }
    much = write(tmp_path / "much.toml", LINE + background.format("1Gbit"))
    assert arrivals(shaped(2, much), {0: [(1, 1000)]}) == {(0, 1): pytest.approx(3e-3 + 1000 / 5e4)}


def test_faults_on_a_shaped_network():
    """A lost message is sent again `timeout` after its last bit left."""
    network = shaped(2, f'racks(2, uplink="{SLOW}", latency="10ms")')
    once = arrivals(network, {0: [(1, 1000)]})[0, 1]
    times = [
        arrivals(network, {0: [(1, 1000)]}, faults=["loss(0.5, timeout=0.5)"], key=key)[0, 1]
        for key in map(Key, range(8))
    ]
    counts = [(time - once) / (0.01 + 0.5) for time in times]
    assert counts == [pytest.approx(round(count), abs=1e-6) for count in counts]
    assert {round(count) for count in counts} >= {0, 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("racks(9)", "more racks than there are workers"),
        ("racks(0)", "must be at least 1"),
        ('racks(2, uplink="fast")', "bandwidth 'fast' is not understood"),
        ('racks(2, uplink="1Gbit,1Gbit,1Gbit")', "3 values for 2 racks"),
        ('wan(2, latency="far")', "duration 'far' is not understood"),
        ('file("no/such/file")', "cannot be read"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        shaped(4, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[link]]\nbetween = [0, 1]\n", "keys"),
        ("[link]\nbetween = [0, 1]\n", "two brackets"),
        ('[[link]]\nbetween = [0, 7]\nbandwidth = "1Gbit"\n', "names the node 7"),
        ('[[link]]\nbetween = [0, 0]\nbandwidth = "1Gbit"\n', "two different points"),
        ('[[link]]\nbetween = [0, "a"]\nbandwidth = "1Gbit"\n', "no way from node 0 to node 1"),
        ("[[cable]]\n", "unknown table 'cable'"),
        ("[[", "cannot be read"),
    ],
)
def test_what_is_refused_in_a_file(content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        shaped(2, write(tmp_path / "links.toml", content))


def test_a_rest_that_the_clock_cannot_show_is_nothing():
    """Late in a run what rounding leaves of a message takes less time than the clock can show."""
    network = Network.parse(4, "1Gbit", "0s")
    fabric = TOPOLOGY.parse('racks(2, uplink="100kbit")').shape(network, 4).fabric
    assert fabric is not None
    flows, generator = Flows(fabric), random.Random(0)
    starts = sorted(1e4 + 1e-3 * generator.random() for _ in range(200))
    done = []
    for _ in range(2000):
        following = flows.next_finish()
        if starts and (following is None or starts[0] <= following):
            src, dst = generator.sample(range(4), 2)
            flows.start(starts.pop(0), Flow(src, dst, generator.randint(1, 9), 0, "x"))
        elif following is not None:
            done += flows.finish(following)
    assert len(done) == 200


@pytest.mark.parametrize("scheduling", ["fusion(1000, first=1000)", "dear(1000)", "priority"])
def test_background_traffic_slows_every_schedule(scheduling, tmp_path):
    """Priorities order a node's own messages; links are shared with others all the same."""
    star = "".join(
        f'[[link]]\nbetween = [{rank}, "hub"]\nbandwidth = "10Mbit"\nlatency = "0s"\n'
        for rank in range(2)
    )
    busy = star + '[[background]]\nfrom = 0\nto = 1\nbandwidth = "10Mbit"\n'
    times = []
    for name, content in (("free", star), ("busy", busy)):
        run = gradwire.simulate(
            workers=2,
            steps=3,
            model="mlp((32,))",
            data="digits",
            compute="fixed(0.0001)",
            scheduling=scheduling,
            topology=write(tmp_path / f"{name}.toml", content),
        )
        times.append(run.virtual_time_s)
    assert times[1] > 1.3 * times[0]


def test_messages_of_a_higher_priority_leave_first():
    """The third of three messages to one node has the highest priority."""
    network = shaped(2, f'racks(2, uplink="{SLOW}", latency="0s")')

    async def sender(node: Node) -> None:
        for number, priority in enumerate((1, 1, 5)):
            await node.spawn(one(node, number), priority)

    async def one(node: Node, number: int) -> None:
        await node.send(1, number, torch.zeros(1000, dtype=torch.uint8))

    async def receiver(node: Node) -> list[float]:
        times = []
        for number in (0, 2, 1):
            await node.recv(0, number)
            times.append(await node.now())
        return times

    first, third, second = VirtualEngine(network, has_priorities=True).run([sender, receiver])[1]
    assert first < third < second
