"""Gradients that come layer by layer in virtual time, and the lane of calls."""

import pytest

from gradwire.core.node import Call, Node
from gradwire.core.profile import Profile, layers_of
from gradwire.core.replica import Bucket
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.coding_time import CodingTime
from gradwire.runtime.virtual.engine import VirtualEngine

LAYERS = (Bucket("a", 0, 1), Bucket("b", 1, 3), Bucket("c", 3, 6))
PROFILE = Profile(LAYERS, forward_s=(1.0, 2.0, 3.0), backward_s=(2.0, 4.0, 8.0))  # 20 in all


def engine(**settings) -> VirtualEngine:
    return VirtualEngine(
        Network((0.0,), (1e9,)),
        evaluate=lambda requests: [f"gradient of {request}" for request in requests],
        seconds=lambda rank, request: 10.0,
        profile=PROFILE,
        **settings,
    )


def test_shares_of_the_time():
    assert PROFILE.forward_ends() == pytest.approx([0.05, 0.15, 0.3])
    assert PROFILE.backward_ends() == pytest.approx([1.0, 0.9, 0.7])


def test_gradients_come_last_layer_first():
    times = {}

    async def program(node: Node) -> None:
        begun = await node.begin("x")
        for layer in (2, 1, 0):
            assert await node.reach(begun, layer) == "gradient of x"
            times[layer] = await node.now()
        assert await node.reach(begun, 2) == "gradient of x"  # it has been there for long
        assert await node.now() == times[0]

    engine().run([program])
    assert times == {2: pytest.approx(7.0), 1: pytest.approx(9.0), 0: pytest.approx(10.0)}


def test_a_forward_pass_waits_for_each_layer():
    """Layer a opens at 1 and takes 0.5, b at 5 and takes 1, c at 2 and takes 1.5."""
    times = {}

    async def later(node: Node, begun, layer: int, at: float) -> None:
        await node.sleep(at)
        await node.open(begun, layer, "x" if layer == 1 else None)

    async def program(node: Node) -> None:
        begun = await node.begin("x", is_open=False)
        for layer, at in ((0, 1.0), (1, 5.0), (2, 2.0)):
            await node.spawn(later(node, begun, layer, at))
        for layer in (2, 1, 0):
            assert await node.reach(begun, layer) == "gradient of x"
            times[layer] = await node.now()

    engine().run([program])
    forward = 5.0 + 1.0 + 1.5
    assert times == {
        2: pytest.approx(forward + 4.0),
        1: pytest.approx(forward + 6.0),
        0: pytest.approx(forward + 7.0),
    }


class OneSecond(CodingTime):
    meters = False

    def seconds(self, call, result, work, taken_s) -> float:
        return 1.0


def test_programs_of_a_node_share_one_lane_for_calls():
    """Beside a gradient, but one after the other."""
    times = []

    async def code(node: Node) -> None:
        await Call(abs, (-1,), shared=False)
        times.append(await node.now())

    async def program(node: Node) -> None:
        begun = await node.begin("x")
        for _ in range(3):
            await node.spawn(code(node))
        await node.reach(begun, 0)
        times.append(await node.now())

    engine(coding=OneSecond()).run([program])
    assert times == pytest.approx([1.0, 2.0, 3.0, 10.0])


def test_a_replay_takes_the_same_time():
    async def code(node: Node) -> None:
        await Call(abs, (-1,), shared=False)

    async def later(node: Node, begun, layer: int) -> None:
        await node.sleep(float(layer))
        await node.open(begun, layer, "x" if layer == 2 else None)

    async def program(node: Node) -> None:
        begun = await node.begin("x")
        for layer in (2, 1, 0):
            await node.reach(begun, layer)
            tasks = [await node.spawn(code(node)) for _ in range(2)]
        for task in tasks:
            await node.join(task)
        begun = await node.begin("x", is_open=False)
        for layer in range(3):
            await node.spawn(later(node, begun, layer))
        await node.reach(begun, 0)

    recorded = engine(coding=OneSecond(), record=True)
    recorded.run([program])
    assert recorded.trace is not None
    assert recorded.trace.replayable
    again = VirtualEngine(Network((0.0,), (1e9,)), profile=PROFILE)
    again.run([recorded.trace.replay])
    assert again.now == pytest.approx(recorded.now)


def test_tensors_of_a_module_are_a_layer():
    names = ["stem.weight", "stem.bias", "block.0.weight", "block.1.weight", "scale"]
    tensors = [Bucket(name, 2 * i, 2 * i + 2) for i, name in enumerate(names)]
    assert layers_of(tensors) == (
        Bucket("stem", 0, 4),
        Bucket("block.0", 4, 6),
        Bucket("block.1", 6, 8),
        Bucket("scale", 8, 10),
    )


@pytest.mark.parametrize(
    ("forward", "backward"),
    [((1.0,), (1.0, 1.0, 1.0)), ((0.0,) * 3, (0.0,) * 3), ((-1.0,) * 3,) * 2],
)
def test_profiles_that_make_no_sense(forward, backward):
    with pytest.raises(ValueError, match="layer"):
        Profile(LAYERS, forward, backward)
