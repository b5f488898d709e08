"""First layers first: the order of partitions, and the credit."""

import pytest

from gradwire.core.node import Node
from gradwire.core.profile import Profile
from gradwire.core.replica import Bucket
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.scheduling.fusion import Fusion
from gradwire.scheduling.priority import Priority, foreseen_order

LAYERS = tuple(Bucket(name, 10 * i, 10 * i + 10) for i, name in enumerate("abcd"))


def profile(bandwidth: float) -> Profile:
    """Gradients of d, c, b, a are there after 1, 2, 3, 4 seconds."""
    return Profile(LAYERS, (0.0,) * 4, (1.0,) * 4, latency_s=0.0, bandwidth=bandwidth)


@pytest.mark.parametrize(
    ("seconds", "credit", "order"),
    [
        (0.5, 40, [3, 2, 1, 0]),  # each is done before the next is there
        (2.5, 40, [3, 1, 0, 2]),  # d until 3.5; then b is there, then until 6 a
        (10.0, 40, [3, 0, 1, 2]),  # while d is under way all others come
        (10.0, 80, [3, 2, 0, 1]),  # two may be under way: d and c
        (10.0, 160, [3, 2, 1, 0]),  # everything leaves at once
    ],
)
def test_the_order_by_hand(seconds, credit, order):
    assert foreseen_order(LAYERS, profile(40 / seconds), credit) == order


def test_partitions_are_cut_from_large_tensors_and_merged_from_small_ones():
    tensors = [
        Bucket("a.weight", 0, 25),
        Bucket("a.bias", 25, 28),
        Bucket("b.weight", 28, 33),
        Bucket("c.weight", 33, 37),
    ]
    found = Priority(40, credit=80).buckets(tensors, profile(1.0))
    assert [(bucket.name, bucket.start, bucket.stop) for bucket in found] == [
        ("a.weight[0]", 0, 8),
        ("a.weight[1]", 8, 16),
        ("a.weight[2]", 16, 25),
        ("a.bias..b.weight", 25, 33),
        ("c.weight", 33, 37),
    ]


def test_fusion_merges_from_the_last_tensor_on():
    tensors = [Bucket(f"{i}.weight", 10 * i, 10 * i + 10) for i in range(6)]
    found = Fusion(80, first=40).buckets(tensors, profile(1.0))
    assert [(bucket.start, bucket.stop) for bucket in found] == [
        (0, 10),
        (10, 30),
        (30, 50),
        (50, 60),
    ]


class Ready:
    """Gradients that are all there."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.profile = profile(4.0)

    async def ready(self, bucket: Bucket) -> int:
        return bucket.start

    async def whole(self) -> int:
        return 0


@pytest.mark.parametrize(("credit", "most"), [(40, 1), (100, 2), (160, 4)])
def test_the_credit_limits_what_is_under_way(credit, most):
    under_way: set[str] = set()
    largest = 0

    async def program(node: Node) -> None:
        async def reduce(bucket: Bucket, x: int) -> None:
            nonlocal largest
            assert x == bucket.start
            under_way.add(bucket.name)
            largest = max(largest, len(under_way))
            await node.sleep(1.0)
            under_way.remove(bucket.name)

        await Priority(40, credit).exchange(Ready(node), LAYERS, reduce)  # type: ignore[arg-type]
        assert not under_way

    engine = VirtualEngine(Network((0.0,), (1e9,)))
    engine.run([program])
    assert largest == most
    assert engine.now == pytest.approx(4.0 / most)


def test_a_partition_larger_than_the_credit_leaves_alone():
    """A tensor may be cut unevenly, and a credit of one partition must not block it."""
    assert foreseen_order(LAYERS, profile(10.0), 4) == [3, 0, 1, 2]
