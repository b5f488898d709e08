"""Bernstein et al. 2019: all hear the sign of the sum of signs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.compression.quantization.signvote import SignVote
from gradwire.core.codec import Codec, finalize, merge, unpack
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from sampling import sizes

KEY = Key(0)
HEADER = 24


def gradient(rank: int, numel: int) -> Tensor:
    x = Key(31).private(rank).normal(numel)
    return x * (Key(32).private(rank).uniform(numel) < 0.8)  # zeros among them


def majority(tensors: list[Tensor]) -> Tensor:
    """The sign of the sum of signs, with sign(0) = +1."""
    total = sum(torch.where(x < 0, -1.0, 1.0) for x in tensors)
    return torch.where(total < 0, -1.0, 1.0)


def averaged(codec: Codec, tensors: list[Tensor], architecture) -> tuple[list[Tensor], int]:
    """What each rank hears, and the bytes that all sent."""
    reducer = lift(codec)

    async def program(node: Node) -> Tensor:
        own = tensors[node.rank]
        state = reducer.init(Spec.of(own), len(tensors))
        group = architecture.group(node, "x")
        reduced = await reducer.mean(own, state, KEY.private(node.rank), group)
        return reduced.mean

    engine = VirtualEngine(Network.uniform(len(tensors)))
    return engine.run([program] * len(tensors)), engine.ledger.total_bytes


@pytest.mark.parametrize("architecture", [AllReduce(), Ring()], ids=repr)
@pytest.mark.parametrize("size", sizes(range(1, 10)))
def test_the_vote_is_the_sign_of_the_sum_of_signs(size, architecture) -> None:
    tensors = [gradient(rank, 101) for rank in range(size)]
    for heard in averaged(SignVote(), tensors, architecture)[0]:
        assert torch.equal(heard, majority(tensors))


@pytest.mark.parametrize("size", sizes(range(1, 10)))
def test_the_tree_carries_counts_up_and_one_bit_down(size) -> None:
    numel = 80_000
    tensors = [gradient(rank, numel) for rank in range(size)]
    # Rank r > 0 sends up the votes of those below it in the binomial tree, r's lowest bit of them.
    below = [min(rank & -rank, size - rank) for rank in range(1, size)]
    up = sum(math.ceil(math.log2(n + 1)) * numel // 8 for n in below)
    down = (size - 1) * numel // 8
    sent = averaged(SignVote(), tensors, AllReduce())[1]
    assert up + down <= sent <= up + down + 2 * (size - 1) * HEADER


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 100_001])
def test_the_wire_carries_one_bit_an_element(numel) -> None:
    payload, _ = SignVote().encode(torch.ones(numel), None, KEY)
    assert payload.nbytes <= -(-numel // 8) + HEADER


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=40), st.randoms())
def test_merging_counts_exactly_in_any_order(seeds, random) -> None:
    spec = Spec((19,), torch.float32)
    codec, tensors = SignVote(), [Key(seed).normal(19) for seed in seeds]
    payloads = [codec.encode(x, None, KEY)[0] for x in tensors]
    while len(payloads) > 1:
        a, b = (payloads.pop(random.randrange(len(payloads))) for _ in range(2))
        payloads.append(unpack(codec, merge(codec, a, b).buffer, spec))
    (merged,) = payloads
    n = len(seeds)
    assert merged.parts["voters"].tolist() == [n]
    assert merged.parts["votes"].numel() == math.ceil(math.log2(n + 1)) * 3
    final = finalize(codec, merged, spec, n)
    assert final.parts["votes"].numel() == 3
    for payload in (merged, final):
        assert torch.equal(codec.decode(payload, spec, KEY), majority(tensors))


def test_the_bytes_of_a_case_by_hand() -> None:
    codec = SignVote()
    payloads = [
        codec.encode(torch.tensor(x), None, KEY)[0]
        for x in ([-1.0, -1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, 1.0], [-1.0, 1.0, 1.0, 1.0])
    ]
    assert [p.parts["votes"].tolist() for p in payloads] == [[0b0011], [0b0111], [0b0001]]
    merged = merge(codec, merge(codec, payloads[0], payloads[1]), payloads[2])
    # Three, two, one and no vote for minus: their low bits, then their high bits.
    assert merged.parts["votes"].tolist() == [0b0101, 0b0011]
    assert codec.decode(merged, Spec((4,), torch.float32), KEY).tolist() == [-1, -1, 1, 1]


def test_zeros_and_ties_are_plus_one() -> None:
    codec, spec = SignVote(0.5), Spec((3,), torch.float32)
    a, _ = codec.encode(torch.tensor([0.0, -0.0, 2.0]), None, KEY)
    assert codec.decode(a, spec, KEY).tolist() == [0.5, 0.5, 0.5]
    b, _ = codec.encode(torch.tensor([-1.0, 1.0, -1.0]), None, KEY)
    assert codec.decode(merge(codec, a, b), spec, KEY).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("architecture", [AllReduce(), Ring()], ids=repr)
def test_a_tensor_of_zeros_abstains(architecture) -> None:
    x, zeros = gradient(0, 50), torch.zeros(50)
    heard, _ = averaged(SignVote(), [zeros, -x.abs() - 1, zeros], architecture)
    assert all((mean == -1).all() for mean in heard)
    heard, _ = averaged(SignVote(), [zeros] * 3, architecture)
    assert all(torch.equal(mean, zeros) for mean in heard)


@pytest.mark.parametrize("first", ["randomk(0.5)", "fp16"])
def test_a_vote_on_the_values_of_a_linear_codec(first) -> None:
    tensors = [gradient(rank, 60) + 3.0 for rank in range(3)]
    heard, _ = averaged(COMPRESSION.parse(f"{first} >> signvote"), tensors, AllReduce())
    assert all(torch.equal(heard[0], mean) for mean in heard)
    kept = heard[0] != 0
    assert int(kept.sum()) == (30 if first.startswith("randomk") else 60)
    assert torch.equal(heard[0][kept], majority(tensors)[kept])


def crafted(voters: int, votes: list[int], numel: int = 9) -> None:
    codec = SignVote()
    payload, _ = codec.encode(torch.ones(numel), None, KEY)
    wrong = payload.replace(
        voters=torch.tensor([voters], dtype=torch.int32),
        votes=torch.tensor(votes, dtype=torch.uint8),
    )
    codec.decode(wrong, Spec((numel,), torch.float32), KEY)


@pytest.mark.parametrize(
    ("voters", "votes", "message"),
    [
        (-1, [0, 0], "voters: -1"),
        (0, [0, 0], "votes: 2 x"),
        (1, [0], "votes: 1 x"),
        (2, [0, 0], "votes: 2 x"),
        (2, [1, 0, 1, 0], "more than the 2"),  # three votes for minus
        (2**31 - 1, [0, 0], "votes: 2 x"),
    ],
)
def test_impossible_votes_are_refused(voters, votes, message) -> None:
    with pytest.raises(WireError, match=message):
        crafted(voters, votes)


def test_payloads_that_cannot_be_added_are_refused() -> None:
    codec = SignVote()
    a, _ = codec.encode(torch.ones(9), None, KEY)
    b, _ = codec.encode(torch.ones(19), None, KEY)
    with pytest.raises(WireError, match="different tensors"):
        merge(codec, a, b)
    many = a.replace(
        voters=torch.tensor([2**31 - 1], dtype=torch.int32),
        votes=torch.zeros(62, dtype=torch.uint8),
    )
    with pytest.raises(WireError, match="at most"):
        merge(codec, many, a)
    full = a.replace(
        voters=torch.tensor([2], dtype=torch.int32), votes=torch.full((4,), 255, dtype=torch.uint8)
    )
    with pytest.raises(WireError, match="more than there are"):
        merge(codec, full, codec.encode(-torch.ones(9), None, KEY)[0])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_magnitude_is_refused(scale) -> None:
    with pytest.raises(ValueError, match="signvote: scale"):
        SignVote(scale)
