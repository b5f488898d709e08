"""How codecs of each algebra come to a mean, on one to five virtual nodes."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Algebra, Codec, Kind, Parts, PayloadMerge, State, Traits, expect
from gradwire.core.key import Key
from gradwire.core.lifted import Lifted, Varying, lift
from gradwire.core.node import Node
from gradwire.core.payload import Payload
from gradwire.core.reducer import Reduced
from gradwire.core.routes import num_sent, scatters
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

SIZES = range(1, 6)


@dataclass(frozen=True, repr=False)
class Majority(Codec):
    """A vote on every sign, to test MERGE: votes add up, their majority is what all hear."""

    algebra = Algebra.MERGE
    leaves = Kind.NOTHING
    parts = ("votes",)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"votes": torch.where(x < 0, -1, 1).to(torch.int8)}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return expect(parts["votes"], "votes", spec.numel, torch.int8).sign().to(spec.dtype)

    @property
    def traits(self) -> Traits:
        return Traits(merging=PayloadMerge(self._merge, self._finalize))

    def _merge(self, a: Payload, b: Payload) -> Payload:
        return a.replace(votes=a.parts["votes"] + b.parts["votes"])

    def _finalize(self, merged: Payload, spec: Spec, size: int) -> Payload:
        return merged


def gradient(rank: int, step: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return Key(21).at(step).private(rank).normal(numel).to(dtype)


def reduced(
    compression,
    size: int,
    numel: int = 50,
    architecture=AllReduce(),  # noqa: B008
    num_steps: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[list[Reduced]], VirtualEngine]:
    """[rank][step]: what each rank gets for its own gradients."""
    reducer = lift(compression)

    async def program(node: Node) -> list[Reduced]:
        results, state = [], reducer.init(Spec((numel,), dtype), size)
        for step in range(num_steps):
            group = architecture.group(node, "model")
            key = Key(5).at(step).private(node.rank)
            x = gradient(node.rank, step, numel, dtype)
            results.append(await reducer.mean(x, state, key, group))
            state = results[-1].state
        return results

    engine = VirtualEngine(Network.uniform(size))
    return engine.run([program] * size), engine


def test_lifting_a_reducer_changes_nothing() -> None:
    reducer = COMPRESSION.parse("ef(sign)")
    assert lift(reducer) is reducer
    assert repr(lift(COMPRESSION.parse("sign"))) == "sign"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "architecture", [AllReduce(), AllReduce("gather"), AllReduce("scatter"), Ring()], ids=repr
)
def test_without_compression_the_mean_is_the_mean(architecture, size) -> None:
    results, _ = reduced(COMPRESSION.parse("identity"), size, architecture=architecture)
    inputs = torch.stack([gradient(rank, 0, 50) for rank in range(size)])
    for rank, (result,) in enumerate(results):
        assert torch.allclose(result.mean, inputs.mean(dim=0), rtol=1e-14, atol=1e-15)
        assert torch.equal(result.mean, results[0][0].mean)
        assert torch.equal(result.own(), inputs[rank])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", [AllReduce(), Ring()], ids=repr)
@pytest.mark.parametrize(
    ("text", "num_values", "itemsize"),
    [
        ("identity", 120, 4),
        ("fp16", 120, 2),
        ("randomk(0.5)", 60, 4),
        ("randomk(0.5) >> fp16", 60, 2),
    ],
)
def test_of_linear_codecs_only_values_travel(
    architecture, text, num_values, itemsize, size
) -> None:
    codec = COMPRESSION.parse(text)
    results, engine = reduced(codec, size, 120, architecture, dtype=torch.float32)
    # No header, no indices: an all-reduce of the values and nothing else.
    assert engine.ledger.total_bytes == 2 * (size - 1) * num_values * itemsize
    own = [result.own() for (result,) in results]
    expected = torch.stack(own).double().mean(dim=0)
    for (result,) in results:
        assert torch.equal(result.mean, results[0][0].mean)
        # Half-precision sums round once per addition.
        slack = size * 2.0 ** (-11 if itemsize == 2 else -24) * 6
        assert torch.allclose(result.mean.double(), expected, rtol=0, atol=slack)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", [AllReduce(), Ring()], ids=repr)
@pytest.mark.parametrize("text", ["sign", "qsgd(3)", "topk(0.1)", "topk(0.3) >> qsgd(bits=4)"])
def test_gathered_payloads_are_decoded_and_averaged(architecture, text, size) -> None:
    codec = COMPRESSION.parse(text)
    results, engine = reduced(codec, size, architecture=architecture)
    expected = torch.zeros(50, dtype=torch.float64)
    total_bytes = 0
    for rank in range(size):
        key = Key(5).at(0).private(rank)
        payload, _ = codec.encode(
            gradient(rank, 0, 50), codec.init(Spec((50,), expected.dtype)), key
        )
        decoded = codec.decode(payload, Spec((50,), torch.float64), key)
        assert torch.equal(results[rank][0].own(), decoded)
        expected += decoded
        total_bytes += payload.nbytes
    for (result,) in results:
        assert torch.equal(result.mean, expected / size)
    assert engine.ledger.total_bytes == (size - 1) * total_bytes


@pytest.mark.parametrize("size", SIZES)
def test_scattered_shards_travel_twice(size) -> None:
    codec = COMPRESSION.parse("sign")
    numel = 64 * size
    results, engine = reduced(codec, size, numel, AllReduce("scatter"))
    shard = codec.encode(torch.ones(64, dtype=torch.float64), None, Key(0))[0].nbytes
    for rank in range(size):
        # One shard to each owner, and the mean of my own shard to everyone.
        assert engine.ledger.sent_by(rank) == 2 * (size - 1) * shard
    for (result,) in results:
        assert result.mean.shape == (numel,)
        assert torch.equal(result.mean, results[0][0].mean)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("text", ["sign", "topk(0.1)", "qsgd(7, bucket=16)", "topk(0.3) >> sign"])
def test_scattering_conserves_mass_with_the_servers_residual(text, size) -> None:
    num_steps, numel = 6, 47  # not a multiple of any size
    results, _ = reduced(
        COMPRESSION.parse(text), size, numel, AllReduce("scatter"), num_steps=num_steps
    )
    heard = sum(result.own() for steps in results for result in steps)
    applied = sum(result.mean for result in results[0]) * size
    owned = [steps[-1].state["scatter"]["owned"] for steps in results]
    residual = torch.cat([kept["residual"] for kept in owned]) * size
    assert torch.allclose(applied + residual, heard, rtol=0, atol=1e-12 * num_steps * size)
    assert residual.abs().max() > 1e-3 or size == 1  # it does lose something for a while


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("text", ["ef(sign)", "ef(topk(0.1) >> qsgd(bits=4))"])
def test_with_feedback_nothing_is_lost_on_either_side(text, route, size) -> None:
    num_steps, numel = 8, 47
    results, _ = reduced(
        COMPRESSION.parse(text), size, numel, AllReduce(route), num_steps=num_steps
    )
    gradients = sum(
        gradient(rank, step, numel) for rank in range(size) for step in range(num_steps)
    )
    applied = sum(result.mean for result in results[0]) * size
    workers = sum(steps[-1].state["residual"] for steps in results)
    total = applied + workers
    if route == "scatter":
        servers = [steps[-1].state["inner"]["scatter"]["owned"]["residual"] for steps in results]
        total = total + torch.cat(servers) * size
    assert torch.allclose(total, gradients, rtol=0, atol=1e-12 * num_steps * size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", [AllReduce(), AllReduce("scatter"), Ring()], ids=repr)
def test_payloads_that_merge_go_up_a_tree(architecture, size) -> None:
    results, engine = reduced(Majority(), size, architecture=architecture)
    inputs = [gradient(rank, 0, 50) for rank in range(size)]
    votes = torch.stack([torch.where(x < 0, -1.0, 1.0) for x in inputs]).double()
    for rank, (result,) in enumerate(results):
        assert torch.equal(result.mean, votes.sum(dim=0).sign())
        assert torch.equal(result.own(), votes[rank])
    payload = Majority().encode(inputs[0], None, Key(0))[0]
    assert engine.ledger.total_messages == 2 * (size - 1)
    assert engine.ledger.total_bytes == 2 * (size - 1) * payload.nbytes


@pytest.mark.parametrize("text", ["identity", "sign", "topk(0.1)", "randomk(0.3)", "ef(sign)"])
@pytest.mark.parametrize("route", ["gather", "scatter"])
def test_the_shape_of_a_tensor_is_kept(text, route) -> None:
    reducer = lift(COMPRESSION.parse(text))

    async def program(node: Node) -> Reduced:
        x = gradient(node.rank, 0, 30).reshape(2, 3, 5)
        state = reducer.init(Spec.of(x), node.size)
        group = AllReduce(route).group(node, "x")
        return await reducer.mean(x, state, Key(1).private(node.rank), group)

    for result in VirtualEngine(Network.uniform(3)).run([program] * 3):
        assert result.mean.shape == (2, 3, 5)
        assert result.own().shape == (2, 3, 5)


@pytest.mark.parametrize("architecture", [AllReduce(), Ring()])
@pytest.mark.parametrize("size", [2, 4])
def test_half_precision_does_not_overflow_where_the_mean_fits(size, architecture) -> None:
    reducer = lift(COMPRESSION.parse("fp16"))

    async def program(node: Node) -> Tensor:
        x = torch.tensor([40_000.0, -40_000.0, 1.0])
        group = architecture.group(node, "x")
        return (await reducer.mean(x, reducer.init(Spec.of(x), size), Key(1), group)).mean

    for mean in VirtualEngine(Network.uniform(size)).run([program] * size):
        assert mean.tolist() == [40_000.0, -40_000.0, 1.0]


def test_the_route_is_chosen_by_what_every_rank_knows() -> None:
    assert scatters("scatter", 2, 1)
    assert not scatters("gather", 100, 10**9)
    assert not scatters("auto", 2, 10**9)  # two ranks send as much either way
    assert not scatters("auto", 8, 8 * 2**14 - 1)
    assert scatters("auto", 8, 8 * 2**14)
    assert scatters("auto", 3, 3 * 2**14)
    # Of 42,087 elements a node would save 63,130 among four ranks, 552,000 among 16.
    assert not scatters("auto", 4, 4_208_650, num_sent=42_087)
    assert scatters("auto", 16, 4_208_650, num_sent=42_087)
    assert scatters("scatter", 4, 4_208_650, num_sent=42_087)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [("topk(0.01)", 10), ("topk(0.01) >> fp16", 10), ("randomk(0.1)", 100), ("sign", None)],
)
def test_codecs_with_a_density_tell_how_many_elements_they_send(codec, expected) -> None:
    assert num_sent(COMPRESSION.parse(codec), torch.zeros(1000)) == expected


def test_a_density_that_falls_does_not_change_the_route() -> None:
    """The owners of shards owe something to the mean, which only they can send."""
    size, numel, warmup, num_steps = 4, 200_000, 3, 14
    # 65,536 elements are scattered among four: more in the first step, fewer in the later ones.
    compression = COMPRESSION.parse(f"ef(topk(ramp(0.5, 0.3, steps={warmup})))")
    reducer = lift(compression)

    async def program(node: Node) -> tuple[Tensor, State]:
        state = reducer.init(Spec((numel,), torch.float64), size)
        applied = torch.zeros(numel, dtype=torch.float64)
        for step in range(num_steps):
            x = gradient(node.rank, step, numel) * (step < warmup)
            group, key = AllReduce().group(node, "model"), Key(5).at(step).private(node.rank)
            done = await reducer.mean(x, state, key, group)
            state, applied = done.state, applied + done.mean
        return applied, state

    results = VirtualEngine(Network.uniform(size)).run([program] * size)
    assert results[0][1]["inner"]["scatter"] is not None
    for _, state in results:
        assert not state["residual"].any()
        assert not state["inner"]["scatter"]["owned"]["residual"].any()
    everything = sum(gradient(rank, s, numel) for rank in range(size) for s in range(warmup))
    torch.testing.assert_close(results[0][0] * size, everything, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "text", ["topk({})", "topk({}) >> qsgd(bits=4)", "ef(topk({}))", "dgc({})", "dgc(topk({}))"]
)
@pytest.mark.parametrize("step", [0, 2, 100])
def test_of_a_ramp_the_largest_density_counts(text, step) -> None:
    for ramp in ("ramp(0.25, 0.01, steps=4)", "ramp(0.01, 0.25, steps=4)"):
        varying = lift(COMPRESSION.parse(text.format(ramp)))
        assert isinstance(varying, Varying)
        now = varying.at(step)
        while not isinstance(now, Lifted):
            now = now.wrapped()
            assert now is not None
        assert num_sent(now.codec, torch.zeros(1000)) == 250


def test_large_tensors_scatter_by_themselves() -> None:
    codec, size = COMPRESSION.parse("sign"), 4
    numel = size * 2**14
    _, engine = reduced(codec, size, numel, dtype=torch.float32)
    whole = codec.encode(torch.ones(numel), None, Key(0))[0].nbytes
    # 2(n-1)/n payloads instead of n-1.
    assert engine.ledger.sent_by(0) < (2 * (size - 1) / size + 0.05) * whole
