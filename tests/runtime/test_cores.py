"""Nodes that share cores, against closed forms."""

import pytest
import torch

from gradwire.core.node import Begin, Compute, Open, Reach
from gradwire.core.profile import Profile
from gradwire.core.replica import Bucket
from gradwire.experiment.simulate.simulation import simulate
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.coding_time import CodingTime
from gradwire.runtime.virtual.host import HOST, Cores
from gradwire.runtime.virtual.sharing import SharedEngine

LATENCY, RATE = 0.5, 1000.0


class Seconds(CodingTime):
    """A call takes as many seconds as its argument says."""

    meters = False

    def seconds(self, call, result, work, taken_s):
        return call.args[0]


def engine(host: Cores, size: int, **options) -> SharedEngine:
    network = Network((LATENCY,) * size, (RATE,) * size)
    return SharedEngine(
        host,
        network,
        coding=Seconds(),
        evaluate=lambda requests: requests,
        seconds=lambda rank, request: request,
        **options,
    )


def identity(x):
    return x


async def work(node, seconds):
    await node.call(identity, seconds)
    return await node.now()


def ends(host: Cores, seconds: list[float]) -> list[float]:
    programs = [lambda node, own=own: work(node, own) for own in seconds]
    return engine(host, len(seconds)).run(programs)


def test_threads_up_to_the_number_of_cores_do_not_disturb_each_other():
    assert ends(Cores(2), [1.0, 3.0]) == pytest.approx([1.0, 3.0])


def test_more_threads_than_cores_share_them_equally():
    assert ends(Cores(2), [1.0] * 4) == pytest.approx([2.0] * 4)
    # Three on two cores until the first has done 1 s, at 1.5 s; then each has its own.
    assert ends(Cores(2), [1.0, 2.0, 3.0]) == pytest.approx([1.5, 2.5, 3.5])


def test_one_core_does_the_work_of_all():
    assert max(ends(Cores(1), [0.3, 0.7, 1.1])) == pytest.approx(2.1)


class WithPrograms(Seconds):
    """Programs take time, too: by a clock that they wind themselves, and three times as long."""

    now_s = 0.0
    program_slowdown = 3.0

    def clock(self):
        return self.now_s


@pytest.mark.parametrize("num_cores", [2, 1])
def test_what_programs_do_between_effects_takes_their_thread(num_cores):
    coding = WithPrograms()

    async def program(node):
        coding.now_s += 0.1
        await node.call(identity, 0.5)
        first = await node.now()
        coding.now_s += 0.2
        await node.send(node.rank, "x", torch.zeros(1))
        await node.recv(node.rank, "x")  # after what its thread does before
        return first, await node.now()

    made = SharedEngine(Cores(num_cores), Network((LATENCY,) * 2, (RATE,) * 2), coding=coding)
    share = 2 / num_cores
    for times in made.run([program] * 2):
        assert times == pytest.approx([share * 0.8, share * 1.4])
    assert made.processor_s == pytest.approx(2 * (0.5 + 3 * 0.3))


def test_messages_take_time_of_both_ends():
    host = Cores(4, send=(0.1, 0.001), receive=(0.2, 0.002), transfer=(0.0, 0.0))

    async def sender(node):
        await node.send(1, "x", torch.zeros(100, dtype=torch.uint8))
        return await node.now()

    async def receiver(node):
        await node.recv(0, "x")
        return await node.now()

    sent, received = engine(host, 2).run([sender, receiver])
    assert sent == pytest.approx(0.1 + 0.1)
    # It begins to leave after 0.1 s; handing over its bytes takes less time than the network.
    assert received == pytest.approx(0.1 + LATENCY + 100 / RATE + 0.2 + 0.2)


def test_bytes_are_moved_while_the_network_carries_them():
    """The slower of both counts; the sender goes on meanwhile."""

    async def sender(node):
        await node.send(1, "x", torch.zeros(100, dtype=torch.uint8))
        return await node.now()

    async def receiver(node):
        await node.recv(0, "x")
        return await node.now()

    carried = LATENCY + 100 / RATE
    for seconds in (0.1, 2.0):
        host = Cores(4, transfer=(seconds, 0.0))
        sent, received = engine(host, 2).run([sender, receiver])
        assert sent == pytest.approx(0.0)
        assert received == pytest.approx(max(carried, seconds))
        host = Cores(4, send=(0.0, seconds / 100))
        sent, received = engine(host, 2).run([sender, receiver])
        assert sent == pytest.approx(seconds)
        assert received == pytest.approx(max(carried, seconds))


def test_a_thread_that_waits_must_wake_up():
    """Two messages at once: the second finds both threads at work with the first."""
    host = Cores(9, receive=(0.1, 0.0), transfer=(0.2, 0.0), wake=(1.0, 2.0))

    async def sender(node):
        await node.send(2, "x", torch.zeros(0, dtype=torch.uint8))

    async def receiver(node):
        times = []
        for rank in range(2):
            await node.recv(rank, "x")
            times.append(await node.now())
        return times

    first, second = engine(host, 3).run([sender, sender, receiver])[2]
    assert first == pytest.approx(2.0 + 0.2 + 1.0 + 0.1)  # the latency has passed by then
    assert second == pytest.approx(first + 0.1)


def test_a_message_waits_for_the_layer_that_is_computed():
    """Of one second each; it comes at 0.6 s and is taken at 1 s, before the second layer."""
    layers = (Bucket("a", 0, 1), Bucket("b", 1, 2))
    profile = Profile(layers, (0.0, 0.0), (1.0, 1.0))

    async def computing(node):
        begun = await Begin(2.0)

        async def read():
            await node.recv(1, "x")
            at = await node.now()
            await node.call(identity, 0.25)
            return at

        reader = await node.spawn(read())
        await Reach(begun, 1)
        last = await node.now()
        await Reach(begun, 0)
        return last, await node.join(reader), await node.now()

    async def sender(node):
        await node.send(0, "x", torch.zeros(100, dtype=torch.uint8))

    times = engine(Cores(2), 2, profile=profile).run([computing, sender])[0]
    assert times == pytest.approx((1.0, 1.0, 2.25))


@pytest.mark.parametrize(("forward", "end"), [("whole", 1.0 + 2.0), ("layers", 1.0 + 1.5)])
def test_a_forward_pass_may_wait_for_all_parameters(forward, end):
    """Layers open at 0 and 1 s; forward 0.5 s each, backward 0.5 s each."""
    layers = (Bucket("a", 0, 1), Bucket("b", 1, 2))
    profile = Profile(layers, (0.5, 0.5), (0.5, 0.5))

    async def computing(node):
        begun = await Begin(2.0, is_open=False)
        await Open(begun, 0)
        await node.sleep(1.0)
        await Open(begun, 1, 2.0)
        result = await Reach(begun, 0)
        return result, await node.now()

    result, time = engine(Cores(1, forward=forward), 1, profile=profile).run([computing])[0]
    assert result == 2.0
    assert time == pytest.approx(end)


def test_gradients_share_cores():
    async def computing(node):
        result = await Compute(1.0)
        return result, await node.now()

    results = engine(Cores(2), 4).run([computing] * 4)
    assert results == [(1.0, pytest.approx(2.0))] * 4


@pytest.mark.parametrize("scheduling", ["sequential", "wfbp", "dear"])
def test_a_host_changes_times_and_no_parameters(scheduling):
    settings = {
        "model": "mlp((16,))",
        "workers": 3,
        "steps": 3,
        "compute": "fixed(0.01)",
        "coding": "free",
        "scheduling": scheduling,
    }
    lanes = simulate(**settings)
    shared = simulate(**settings, host="cores(1, send=(0.001, 0.0))", burst=1000)
    assert shared.params.equal(lanes.params)
    # Three gradients of 0.01 s on one core in each of three steps.
    assert lanes.virtual_time_s < 3 * 3 * 0.01 < shared.virtual_time_s
    assert shared.ledger.total_bytes == lanes.ledger.total_bytes


def test_workers_that_do_not_pause_share_cores_too():
    settings = {"workers": 2, "steps": 4, "compute": "fixed(0.01)", "coding": "free"}
    settings |= {"synchronization": "asp", "architecture": "parameter_server"}
    run = simulate(**settings, host="cores(1)")
    assert run.virtual_time_s > 2 * 4 * 0.01


def test_a_host_is_written_as_it_is_read():
    for text in ("lanes", *Cores.examples):
        assert repr(HOST.parse(text)) == repr(HOST.parse(repr(HOST.parse(text))))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("cores(0)", "above 0"),
        ("cores(2, send=(-1.0, 0.0))", "send"),
        ("cores(2, receive=(1.0,))", "receive"),
        ('cores(2, forward="x")', "forward"),
    ],
)
def test_wrong_hosts_are_refused(text, named):
    with pytest.raises(ValueError, match=named):
        HOST.parse(text)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host": "cores(2)", "what_if": ("1Gbit",)}, "what_if"),
        ({"host": "cores(2)", "faults": ("loss(0.1)",)}, "faults"),
        ({"burst": 10, "faults": ("loss(0.1)",)}, "burst"),
        ({"burst": 10, "topology": "racks(2)"}, "burst"),
        ({"burst": -1}, "burst"),
    ],
)
def test_what_the_models_leave_out_is_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        simulate(steps=1, **settings)
