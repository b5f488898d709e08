"""Laws of reducers: the mean that n workers agree on, and their states."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.core.codec import Codec, Compression, Kind
from gradwire.core.errors import GradwireWarning
from gradwire.core.key import Key
from gradwire.core.lifted import Lifted, lift
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.testing.laws import Laws, NotApplicable, raises

REDUCER_LAWS = Laws()
COMPRESSION_LAWS = Laws()
SIZES = range(1, 6)
SHAPES = ((0,), (1,), (33,), (6, 10), (4, 3, 3, 3), ())


def gradient(rank: int, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numel = Spec(shape, dtype).numel
    return Key(3).at(step).private(rank).normal(numel).to(dtype).reshape(shape)


def zeros(rank: int, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def run_means(
    reducer: Reducer,
    size: int,
    shape: tuple[int, ...],
    steps: range = range(2),
    dtype: torch.dtype = torch.float32,
    states: list[Any] | None = None,
    inputs: Callable[[int, int, tuple[int, ...], torch.dtype], Tensor] = gradient,
    architecture: Architecture = AllReduce(),  # noqa: B008
) -> tuple[list[list[Reduced]], VirtualEngine]:
    """[rank][step]: what each rank gets; from the beginning unless `states` are given."""

    async def program(node: Node) -> list[Reduced]:
        results: list[Reduced] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradwireWarning)
            state = reducer.init(Spec(shape, dtype), size) if states is None else states[node.rank]
        for step in steps:
            key = Key(8).at(step).private(node.rank)
            group = architecture.group(node, "x")
            x = inputs(node.rank, step, shape, dtype)
            before = x.clone()
            results.append(await reducer.mean(x, state, key, group))
            assert torch.equal(x, before), "the reducer changed its input"
            state = results[-1].state
        return results

    engine = VirtualEngine(Network.uniform(size))
    return engine.run([program] * size), engine


@REDUCER_LAWS(size=SIZES)
def every_rank_gets_the_same_mean_of_the_right_shape(reducer: Reducer, size: int) -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float16):
            results, _ = run_means(reducer, size, shape, dtype=dtype)
            for step, first in enumerate(results[0]):
                assert (first.mean.shape, first.mean.dtype) == (shape, dtype)
                assert torch.isfinite(first.mean).all()
                for rank in range(size):
                    result = results[rank][step]
                    assert torch.equal(result.mean, first.mean), f"rank {rank}, step {step}"
                    assert result.own().shape == shape


@REDUCER_LAWS(architecture=(AllReduce("scatter"), Ring()))
def every_route_gives_the_same_mean(reducer: Reducer, architecture: Architecture) -> None:
    results, _ = run_means(reducer, 3, (12, 10), architecture=architecture)
    for steps in results:
        for result, first in zip(steps, results[0]):
            assert torch.equal(result.mean, first.mean)
            assert result.own().shape == (12, 10)


@REDUCER_LAWS(size=(1, 3))
def the_same_keys_give_the_same_bits_and_bytes(reducer: Reducer, size: int) -> None:
    (first, engine), (again, other) = (run_means(reducer, size, (12, 10)) for _ in range(2))
    assert engine.ledger.total_bytes == other.ledger.total_bytes
    for a, b in zip(first, again):
        assert all(torch.equal(x.mean, y.mean) for x, y in zip(a, b))


@REDUCER_LAWS(size=SIZES)
def zero_stays_zero(reducer: Reducer, size: int) -> None:
    results, _ = run_means(reducer, size, (6, 10), range(3), inputs=zeros)
    for steps in results:
        for result in steps:
            assert torch.equal(result.mean, torch.zeros(6, 10))  # false if any is NaN


@REDUCER_LAWS(size=(1, 4))
def a_checkpoint_holds_the_state(reducer: Reducer, size: int) -> None:
    shape = (12, 10)
    whole, _ = run_means(reducer, size, shape, range(4))
    half, _ = run_means(reducer, size, shape, range(2))
    file = io.BytesIO()
    torch.save([steps[-1].state for steps in half], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    resumed, _ = run_means(reducer, size, shape, range(2, 4), states=states)
    for steps, rest in zip(whole, resumed):
        for result, again in zip(steps[2:], rest):
            assert torch.equal(result.mean, again.mean)


@REDUCER_LAWS()
def a_state_is_not_changed_in_place(reducer: Reducer) -> None:
    states = [steps[-1].state for steps in run_means(reducer, 2, (12, 10))[0]]
    first, _ = run_means(reducer, 2, (12, 10), range(2, 4), states=states)
    again, _ = run_means(reducer, 2, (12, 10), range(2, 4), states=states)
    for a, b in zip(first, again):
        assert all(torch.equal(x.mean, y.mean) for x, y in zip(a, b))


@REDUCER_LAWS()
def one_worker_sends_nothing(reducer: Reducer) -> None:
    _, engine = run_means(reducer, 1, (12, 10))
    assert engine.ledger.total_bytes == 0


@COMPRESSION_LAWS()
def the_owner_of_a_shard_does_not_feed_back_what_would_grow(codec: Compression) -> None:
    """Of the same gradients in every step the error stays what it was, or shrinks."""
    if (
        not isinstance(codec, Codec)
        or codec.traits.needs_feedback
        or codec.traits.takes is Kind.SYMBOLS
    ):
        raise NotApplicable("not a way of averaging on its own")

    def same(rank: int, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return gradient(rank, 0, shape, dtype)

    results, _ = run_means(
        lift(codec), 3, (600,), range(30), inputs=same, architecture=AllReduce("scatter")
    )
    exact = torch.stack([same(rank, 0, (600,), torch.float32) for rank in range(3)]).mean(0)
    errors = [float((result.mean - exact).norm()) for result in results[0]]
    # Errors that are fed back may add up for a few steps before they converge.
    assert max(errors[-5:]) <= 6 * max(*errors[:5], float(exact.norm()))


@COMPRESSION_LAWS()
def a_server_decodes_what_a_worker_alone_pushed(compression: Compression) -> None:
    """In steps one after the other, and from the bytes alone."""
    if isinstance(compression, Codec) and compression.traits.takes is Kind.SYMBOLS:
        raise NotApplicable("nothing without a quantiser before it")
    reducer, spec = lift(compression), Spec((60,), torch.float32)
    if not reducer.can_push or (
        isinstance(reducer, Lifted) and reducer.codec.traits.needs_feedback
    ):
        with raises(TypeError, ValueError):
            reducer.decode_push([], spec, Key(0))
        return

    async def program(node: Node) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradwireWarning)
            state = reducer.init(spec, 4)
        for step in range(3):
            key = Key(8).at(step).private(2)
            pushed = await reducer.push(gradient(0, step, (60,), spec.dtype), state, key, node)
            decoded = reducer.decode_push(pushed.messages, spec, key)
            assert torch.equal(decoded, pushed.own())
            state = pushed.state

    VirtualEngine(Network.uniform(1)).run([program])
