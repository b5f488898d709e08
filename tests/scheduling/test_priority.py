"""First layers first: the order of partitions, and the credit."""

import pytest

from gradwire.core.node import Node
from gradwire.core.profile import Profile
from gradwire.core.replica import Bucket
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.scheduling.fusion import Fusion
from gradwire.scheduling.priority import Priority, foreseen_order, foreseen_step

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
    layers = (Bucket("a", 0, 28), Bucket("b", 28, 33), Bucket("c", 33, 37))
    own = Profile(layers, (0.0,) * 3, (1.0,) * 3)
    found = Priority(40, credit=80, merge=40).buckets(tensors, own)
    assert [(bucket.name, bucket.start, bucket.stop) for bucket in found] == [
        ("a.weight[0]", 0, 8),
        ("a.weight[1]", 8, 16),
        ("a.weight[2]", 16, 25),
        ("a.bias..b.weight", 25, 33),
        ("c.weight", 33, 37),
    ]


def test_tensors_of_several_layers_are_merged_only_up_to_a_size_of_its_own():
    tensors = [
        Bucket("a.weight", 0, 5),
        Bucket("a.bias", 5, 6),
        Bucket("b.weight", 6, 8),
        Bucket("c.weight", 8, 9),
        Bucket("c.bias", 9, 10),
    ]
    layers = (Bucket("a", 0, 6), Bucket("b", 6, 8), Bucket("c", 8, 10))
    own = Profile(layers, (1.0,) * 3, (1.0,) * 3)

    def names(merge: int) -> list[str]:
        return [b.name for b in Priority(40, credit=40, merge=merge).buckets(tensors, own)]

    assert names(0) == ["a.weight..a.bias", "b.weight", "c.weight..c.bias"]
    assert names(16) == ["a.weight..a.bias", "b.weight..c.bias"]
    assert names(40) == ["a.weight..c.bias"]


def test_the_foreseen_step_by_hand():
    """Gradients of d to a are there after 1 to 4 s of backward; an exchange takes 2 s.

    A gradient takes 8 s, 4 of them for the forward pass. With a credit of one bucket, d is there
    at 7, b at 9, a at 11, c at 13: the next forward pass has a from 11, b from 12, c from 13 on.
    """
    own = Profile(LAYERS, (1.0,) * 4, (1.0,) * 4, latency_s=2.0)
    assert foreseen_order(LAYERS, own, 40) == [3, 1, 0, 2]
    assert foreseen_step(LAYERS, own, 40) == pytest.approx(13 + 2 - 4)
    # With credit for all: d, c, b, a are there at 7, 9, 11, 13.
    assert foreseen_step(LAYERS, own, 160) == pytest.approx(13 + 4 - 4)


def test_what_is_not_given_is_chosen_so_that_the_foreseen_step_is_short():
    tensors = [Bucket(f"{layer.name}.weight", layer.start, layer.stop) for layer in LAYERS]
    costly = Profile(LAYERS, (1.0,) * 4, (1.0,) * 4, latency_s=100.0)
    free = Profile(LAYERS, (1.0,) * 4, (1.0,) * 4, latency_s=0.0, bandwidth=10.0)
    for own in (costly, free):
        chosen = Priority().resolve(tensors, own)
        assert None not in (chosen.partition, chosen.credit, chosen.merge)
        best = foreseen_step(chosen.buckets(tensors, own), own, chosen.credit)
        for other in (Priority(40, 160, 0), Priority(160, 160, 160), Priority(20, 20, 0)):
            # Within a tenth fewer partitions are better: they cost less that nobody foresees.
            shortest = foreseen_step(other.buckets(tensors, own), own, other.credit)
            assert best <= 1.1 * shortest
    assert len(Priority().buckets(tensors, costly)) == 1
    assert len(Priority().buckets(tensors, free)) >= 4
    assert Priority(credit=24).resolve(tensors, free).credit == 24
    assert Priority(40, 40, 0).resolve(tensors, costly) == Priority(40, 40, 0)


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


def test_a_credit_below_all_partitions_is_the_partition():
    own = Priority(credit=4).resolve(LAYERS, profile(1.0))
    assert (own.partition, own.credit) == (4, 4)
